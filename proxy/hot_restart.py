"""The steps by which a process takes the place of another, or of none, and gives it back."""

import asyncio
import faulthandler
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing

from structlog import get_logger

from metrics.member_names import member_name
from proxy.config import Config
from proxy.config.secrets import read_secrets
from proxy.config.stores import open_store
from proxy.host_ports import HostMemberSockets
from proxy.quota.rule_registry import read_changes
from proxy.relay.take_over import (
    SERVE_TIMEOUT_S,
    Predecessor,
    ReplaceableProxy,
    TakeOverError,
    TakeOverServer,
)
from proxy.tier.key_rules import TierKeyRules
from proxy.tier.tier_member import open_tier_store
from proxy.wiring import bootstrap_of

_log = get_logger(__name__)


@asynccontextmanager
async def taking_over(
    predecessor: Predecessor | None,
    config: Config,
    ports: HostMemberSockets,
    stop: asyncio.Event | None,
) -> AsyncIterator[None]:
    """Open all ports; who enters opens the rest, and has the place of a `predecessor` at the end.

    That serves until then. The ports are shared with it, and what it has in its state is read; only
    then it is told to release that, which is waited for. New connections wait meanwhile; none is
    refused. In the end it is told to stop, unless `stop` is set. If that takes longer than
    SERVE_TIMEOUT_S, this process is ended. Whatever fails, the ports are closed, and it serves on.
    Raises ListenerError, StateError, TakeOverError.
    """
    try:
        if predecessor is not None:
            ports.sharing_with = predecessor.sockets
        ports.open_all()
        if predecessor is not None:
            await asyncio.to_thread(_check_state, config, predecessor.pid)
            _check_wanted(stop)
            await asyncio.to_thread(_release, predecessor, ports)
        yield
        if predecessor is not None:
            _check_wanted(stop)
            predecessor.stop()
    except BaseException:
        ports.close()
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def _check_state(config: Config, owner: int) -> None:
    """Read the state, which another process has, as a successor would. Raises StateError."""
    way = bootstrap_of(config, read_secrets(config), lambda: None)
    if (tier := config.tier) is None:
        state = open_store(config, way, owner)
    else:
        state = open_tier_store(config, way, member_name(0, tier.machine), TierKeyRules(config))
    with closing(state):
        read_changes(state)


def _release(predecessor: Predecessor, ports: HostMemberSockets) -> None:
    """Get all new connections, and have the predecessor release what only one can have.

    Raises ListenerError; then it serves on.
    """
    # Also where a call never returns; it says where that is.
    faulthandler.dump_traceback_later(SERVE_TIMEOUT_S, exit=True)
    ports.take_over()
    if not predecessor.release(SERVE_TIMEOUT_S):
        text = "the proxy to be replaced has ended by itself"
        _log.warning(text, process=predecessor.pid)


def _check_wanted(stop: asyncio.Event | None) -> None:
    """Raise TakeOverError when this proxy is to stop: then the predecessor must serve on."""
    if stop is not None and stop.is_set():
        raise TakeOverError("this proxy was told to stop before it took over", "start it again")


async def serve_until(
    stop: asyncio.Event, ready: Callable[[], None], proxy: ReplaceableProxy
) -> None:
    """Serve until `stop` is set, as a successor does, then stop. Raises what a task died of."""
    old_process = TakeOverServer(proxy, stop)
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
