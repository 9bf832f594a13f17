"""The steps by which a process takes the place of another, or of none, and gives it back."""

import asyncio
import faulthandler
from collections.abc import Callable

from structlog import get_logger

from proxy.config.stores import PresentOwner
from proxy.quota.rule_registry import read_changes
from proxy.relay.ports import SharedPorts
from proxy.relay.take_over import (
    SERVE_TIMEOUT_S,
    OldProcess,
    Predecessor,
    ReplacedProxy,
    TakeOverError,
)
from proxy.state import Store

_log = get_logger(__name__)


class HotRestart:
    """Takes the place of a `predecessor`, if there is one, unless `stop` is set before.

    The `ports` of this process, which are to be opened then, are shared with it.
    """

    def __init__(
        self, predecessor: Predecessor | None, ports: SharedPorts, stop: asyncio.Event | None
    ) -> None:
        self._predecessor, self._ports, self._stop = predecessor, ports, stop
        if predecessor is not None:
            ports.sharing_with = predecessor.sockets

    @property
    def state_owner(self) -> PresentOwner | None:
        """What has the state now; None when nobody is replaced."""
        if self._predecessor is None:
            return None
        return PresentOwner(self._predecessor.pid, self._replace)

    def _replace(self, state: Store) -> None:
        """Get all new connections and the predecessor's state, if we could go on with that.

        Raises StateError, ListenerError, TakeOverError; then it serves on.
        """
        read_changes(state)
        self.release_predecessor()

    def release_predecessor(self) -> None:
        """Get all new connections, and have the predecessor release what only one can have.

        Raises ListenerError, TakeOverError; then it serves on.
        """
        if self._predecessor is None:
            return
        self._check_wanted()
        # Also where a call never returns; it says where that is.
        faulthandler.dump_traceback_later(SERVE_TIMEOUT_S, exit=True)
        self._ports.take_over()
        if not self._predecessor.release(SERVE_TIMEOUT_S):
            text = "the proxy to be replaced has ended by itself"
            _log.warning(text, process=self._predecessor.pid)

    def complete(self) -> None:
        """Have the predecessor stop: all is open here. Raises TakeOverError; then it serves on."""
        if self._predecessor is not None:
            self._check_wanted()
            self._predecessor.stop()
            faulthandler.cancel_dump_traceback_later()

    def _check_wanted(self) -> None:
        """Raise TakeOverError when this proxy is to stop: then the predecessor must serve on."""
        if self._stop is not None and self._stop.is_set():
            raise TakeOverError("this proxy was told to stop before it took over", "start it again")


async def serve_until(stop: asyncio.Event, ready: Callable[[], None], proxy: ReplacedProxy) -> None:
    """Serve until `stop` is set, as a successor does, then stop. Raises what a task died of."""
    old_process = OldProcess(proxy, stop)
    try:
        await old_process.open()
        ready()
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait((stopping, *proxy.tasks), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for task in done - {stopping}:
            task.result()
    finally:
        await old_process.close()
        await proxy.stop()
