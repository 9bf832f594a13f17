"""Asks the other members of a tier: whether they live, and to take what their clients had here."""

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from structlog import get_logger

from proxy.quota.manager import SensorDebt
from proxy.state import Document, Record
from proxy.tasks import end_tasks
from proxy.tier.peer_client import (
    ALIVE_PATH,
    LONG_ALIVE_PATH,
    LONG_S,
    RECORDS_PATH,
    PeerClient,
    PeerDownError,
    PeerError,
    Target,
)

ALIVE_INTERVAL_S = 0.5
"""Between two questions to each member."""

PEER_TIMEOUT_S = 1.0
"""For each question. A member that is busy for longer is asked again."""

MAX_PEER_ANSWER_BYTES, MAX_PEER_ANSWER_TIMES = 64 << 10, 2
"""So much an answer has at most, and so many times the bytes of its question, whose rows it may
repeat. It is read on the event loop."""

SILENT_AFTER_S = 2.0
"""A member that has not answered for so long is silent: others serve its clients meanwhile. What
this process stood still beyond PEER_TIMEOUT_S does not count."""

LOOK_AGAIN_S, LOOKS = 0.05, 20
"""Between two looks at a member whose connection broke, and how many: its port may stay open for a
moment."""

_log = get_logger(__name__)


class PeerTasks:
    """Tasks about `subject`, one at a time for each member; the log has their faults."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self.running: dict[str, asyncio.Task[Any]] = {}

    def start(self, member: str, work: Coroutine[Any, Any, object]) -> None:
        """Begin the task of a member that has none."""
        task = self.running[member] = asyncio.create_task(work)
        task.add_done_callback(partial(self._ended, member))

    async def end(self) -> None:
        """Cancel all, and return when they have ended."""
        await end_tasks(self.running.values())

    def _ended(self, member: str, task: asyncio.Task[Any]) -> None:
        del self.running[member]
        if not task.cancelled() and (error := task.exception()) is not None:
            text = f"unexpected error about {self._subject}"
            _log.error(text, owner=member, exc_info=error)


class Peers:
    """The other members of a tier, which `client` asks at their admin ports."""

    def __init__(self, client: PeerClient) -> None:
        self._client = client
        self.on_silent: Callable[[], None] = lambda: None
        """Called when others are silent than before."""
        self._urls: dict[str, str] = {}
        self._unheard_s: dict[str, float] = {}
        """For how long each has not answered."""
        self.silent: frozenset[str] = frozenset()
        """Those that have not answered for SILENT_AFTER_S, or have died."""
        self.failing: set[str] = set()
        """Those that the latest question had no answer from."""
        self._polling, self._following = PeerTasks("members"), PeerTasks("members")

    def use(self, urls: Mapping[str, str]) -> None:
        """Ask these members from now on: the URLs of their admin ports by name."""
        self._urls = dict(urls)
        self._unheard_s = {name: self._unheard_s.get(name, 0.0) for name in urls}
        self.failing &= urls.keys()
        self._judge()

    def targets(self) -> list[Target]:
        """Return how each is asked."""
        return [Target(name, url, name not in self.silent) for name, url in self._urls.items()]

    async def watch(self) -> None:
        """Ask each member in turn whether it lives, until cancelled."""
        clock = asyncio.get_running_loop().time
        try:
            while True:
                for name in self._urls.keys() - self._polling.running.keys():
                    self._polling.start(name, self._poll(name))
                # A connection to each, which breaks when it dies.
                for name in self._urls.keys() - self.silent - self._following.running.keys():
                    self._following.start(name, self._until_broken(name))
                begun_s = clock()
                await asyncio.sleep(ALIVE_INTERVAL_S)
                passed_s = min(clock() - begun_s, PEER_TIMEOUT_S)
                for name in self._unheard_s:
                    self._unheard_s[name] += passed_s
                self._judge()
        finally:
            await self._polling.end()
            await self._following.end()

    async def generations(self, names: Iterable[str]) -> list[int]:
        """Return the group's generation that each of these members is in that answers."""
        asked = (self._ask("GET", name, ALIVE_PATH) for name in names)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = (each.get("group") for each in answers if isinstance(each, dict))
        return [each for each in found if isinstance(each, int)]

    async def rows(self, member: str, path: str, body: Document, key: str) -> list[Any]:
        """Send a document; return the list that is answered under a key. Raises PeerError."""
        answer = await self._ask("POST", member, path, body)
        rows = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(rows, list):
            raise PeerError(member, f"{path} was not understood")
        return rows

    async def give(
        self, member: str, records: Sequence[Record], debts: Sequence[SensorDebt]
    ) -> None:
        """Have a member keep records, and what clients owe, as its own. Raises PeerError."""
        rows = [(each.key, each.text, each.version) for each in records]
        owed = [debt.document() for debt in debts]
        await self._ask("POST", member, RECORDS_PATH, {"records": rows, "owed": owed})

    async def _until_broken(self, name: str) -> None:
        """Follow a member for LONG_S, or until it ends; then find out whether it has died."""
        with suppress(PeerError):
            await self._ask("GET", name, LONG_ALIVE_PATH, limit_s=LONG_S + PEER_TIMEOUT_S)
        for _ in range(LOOKS):
            if await self._poll(name):
                return
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _poll(self, name: str) -> bool:
        """Ask a member whether it lives; return whether that is known.

        Where nobody listens it is dead, and silent at once.
        """
        try:
            await self._ask("GET", name, ALIVE_PATH)
        except PeerDownError:
            self._heard(name, math.inf)
            self._judge()
        except PeerError as error:
            _log.debug("member does not answer", member=name, error=str(error))
            return False
        else:
            self._heard(name, 0.0)
        return True

    def _heard(self, name: str, ago_s: float) -> None:
        if name in self._unheard_s:  # it may have left the tier meanwhile
            self._unheard_s[name] = ago_s

    def _judge(self) -> None:
        silent = frozenset(
            name for name, ago_s in self._unheard_s.items() if ago_s >= SILENT_AFTER_S
        )
        if silent == self.silent:
            return
        for name in silent - self.silent:
            _log.warning("member does not answer, others serve its clients", member=name)
        for name in self.silent & self._unheard_s.keys() - silent:
            _log.info("member answers again", member=name)
        self.silent = silent
        self.on_silent()

    async def _ask(
        self, method: str, member: str, path: str, body: Any = None, limit_s: float | None = None
    ) -> Any:
        url = self._urls.get(member)
        if url is None:
            raise PeerError(member, "it is not in the tier", was_sent=False)
        to, data = Target(member, url), None if body is None else json.dumps(body).encode()
        limit_s = limit_s or PEER_TIMEOUT_S
        most_bytes = MAX_PEER_ANSWER_BYTES + MAX_PEER_ANSWER_TIMES * len(data or b"")
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._client.send(to, method, path, {}, data, most_bytes)
            if reply.status != HTTPStatus.OK:
                raise PeerError(member, f"{path} answers {reply.status}")
        except TimeoutError:
            self.failing.add(member)
            raise PeerError(member, f"it did not answer within {limit_s:g} s") from None
        except PeerError:
            self.failing.add(member)
            raise
        self.failing.discard(member)
        try:
            return json.loads(reply.body)
        except (ValueError, RecursionError) as error:
            raise PeerError(member, str(error)) from None
