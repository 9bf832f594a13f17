"""Records who changed what while the proxy runs, from what to what; kept in the state."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from structlog import get_logger

from proxy.admin.document_models import iso
from proxy.admin.replies import ApiError
from proxy.progress.report import ALL_QUERIES, ReportableQueries
from proxy.quota.values import BadValueError
from proxy.state import Record, RecordFormat, StateError, Store

KEPT_CHANGES = 1_000  # how many are kept; of more the oldest are forgotten
DISPLAYED_CHANGES = 20  # in the status
REFUSAL_INTERVAL_S = 86_400.0  # between two records of the same refusal
RECORDED = 10  # refusals in REFUSAL_INTERVAL_S, of one token; further ones are only counted

LOCAL_AUTHOR, FILE = "local", "file"
"""Names of those without a token: anybody on this machine, and the configuration file."""

_NUMBER_DIGITS = 15  # so that keys sort as numbers


Change = dict[str, Any]
"""What was changed, for whoever records it: `what`, `before` and `after`."""


@dataclass(frozen=True, slots=True)
class Author:
    """Who makes a change, or reports."""

    name: str
    """Of the token, LOCAL_AUTHOR or FILE."""
    address: str | None = None
    """From which the request came; None for what was no request."""
    queries: ReportableQueries = ALL_QUERIES
    """On which it may report."""
    may_do_all: bool = False
    """Whether it has all rights: by its token, or since there are none."""
    deferred: list[Change] | None = None
    """Takes changes that another process is to record: of many that share a state only one may
    number them. None: they are recorded here."""


BY_FILE = Author(FILE)

_author: ContextVar[Author] = ContextVar("author")

_log = get_logger(__name__)


def set_author(author: Author) -> None:
    """Set who sent the request that is being answered."""
    _author.set(author)


def current_author() -> Author:
    """Return who sent the request that is being answered; only for one that passed the guard."""
    return _author.get()


def log_change(event: str, level: str = "info", /, **about: object) -> None:
    """Log a change, and who has made it."""
    who = current_author()
    getattr(_log, level)(event, **about, who=who.name, remote=who.address)


class AuditedChange(BaseModel):
    """One change, as it stands in the state."""

    model_config = ConfigDict(frozen=True)

    number: int
    """Counts up from 1, over restarts."""
    at_s: float
    """Seconds since the epoch."""
    who: str
    address: str | None
    what: str
    """What was changed, such as `quota client-id=etl`."""
    before: Any
    """As JSON has it; None: there was nothing."""
    after: Any


_RECORDS = RecordFormat("audit", 1, AuditedChange)  # keys are `audit/NUMBER`


class AuditLog:
    """The latest changes, `kept` of them, those of earlier runs included.

    What of them cannot be read any more is left out, and said in the log. Raises StateError when
    the store cannot be read at all.
    """

    def __init__(self, store: Store, kept: int = KEPT_CHANGES) -> None:
        self._changing = asyncio.Lock()
        self._changes: deque[AuditedChange] = deque(maxlen=kept)
        self._stored: set[int] = set()
        """Numbers that the store has, of what is forgotten as well until that is deleted there."""
        self._next = 1
        self._refused_s: defaultdict[str, dict[str, float]] = defaultdict(dict)
        """When refusals were recorded, by the token's name and what was said to it."""
        self._store = store
        self._read(store.items(_RECORDS.prefix))

    async def reread(self) -> None:
        """Read what another process has recorded by now. Raises StateError."""
        self._read(await asyncio.to_thread(self._store.items, _RECORDS.prefix))

    def _read(self, records: Iterable[Record]) -> None:
        """Put what the store has in the place of what was known."""
        self._changes.clear()
        self._stored.clear()
        self._next, unread = 1, 0
        for record in records:
            try:
                self._next = int(record.key.removeprefix(_RECORDS.prefix)) + 1
                self._changes.append(_RECORDS.read(record))
                self._stored.add(self._changes[-1].number)
            except ValueError:
                unread += 1
        if unread:
            _log.warning("changes in the state's audit cannot be read", records=unread)

    @asynccontextmanager
    async def recording(
        self, what: str, get: Callable[[], object], fix: str = ""
    ) -> AsyncIterator[None]:
        """Record the change that a request makes in the body to what `get` returns, as JSON has it.

        The body says by raising that it made none. That of a request that is cancelled is recorded,
        too: it is kept, and so in force. Bodies run one after the other: what one has made is what
        the next one finds. Raises ApiError for the body's ValueError, which `fix` mends.
        """
        try:
            async with self._changing:
                before, is_refused = get(), False
                try:
                    yield
                except Exception:
                    is_refused = True
                    raise
                finally:
                    if not is_refused and (after := get()) != before:
                        await self.record(current_author(), what, before, after, time.time())
        except BadValueError as error:
            raise ApiError(400, error.message, error.fix) from None
        except ValueError as error:
            raise ApiError(400, str(error), fix) from None

    async def record_refusal(self, refusal: str, now_s: float) -> None:
        """Record in log and audit that a token reported on a query that is not its own.

        Seldom, so that the audit has room: whoever has a token may send reports all day.
        """
        who = current_author()
        recorded_s = self._refused_s[who.name]
        for text, at_s in tuple(recorded_s.items()):
            if now_s - at_s >= REFUSAL_INTERVAL_S:
                del recorded_s[text]
        if refusal in recorded_s or len(recorded_s) >= RECORDED:
            return
        recorded_s[refusal] = now_s
        log_change("report refused", "warning", problem=refusal)
        await self.record(who, "report refused", None, refusal, now_s)

    async def record(
        self, who: Author, what: str, before: object, after: object, now_s: float
    ) -> None:
        """Record that somebody changed something, at a time since the epoch; return when it's kept.

        `before` and `after` are as JSON has them. It is kept also if the caller is cancelled. Where
        the state cannot be written that is said in the log, and tried again with the next change.
        """
        about: Change = {"what": what, "before": before, "after": after}
        if who.deferred is not None:
            who.deferred.append(about)
            return
        change = AuditedChange(
            number=self._next, at_s=now_s, who=who.name, address=who.address, **about
        )
        self._next += 1
        self._changes.append(change)
        unsaved = [each for each in self._changes if each.number not in self._stored]
        gone = {number for number in self._stored if number < self._changes[0].number}
        keys = [_RECORDS.key(_digits(number)) for number in gone]
        try:
            new = [_RECORDS.record((_digits(each.number),), each.model_dump()) for each in unsaved]
            await self._store.write(new, delete=keys)
        except StateError as error:
            _log.error("a change is not kept in the state's audit", problem=str(error), what=what)
        else:
            self._stored = (self._stored - gone) | {each.number for each in unsaved}

    def latest(self, text: str = "") -> Iterator[AuditedChange]:
        """Yield the changes, the newest first, whose author or subject has `text` (lower case)."""
        return (
            change
            for change in reversed(self._changes)
            if not text or text in f"{change.who}\n{change.address}\n{change.what}".lower()
        )

    def documents(
        self, limit: int = DISPLAYED_CHANGES, text: str = ""
    ) -> tuple[int, list[dict[str, Any]]]:
        """Return how many changes have `text`, as `latest`, and the newest of them for JSON."""
        found = list(self.latest(text))
        return len(found), [
            {**change.model_dump(exclude={"at_s"}), "at": iso(change.at_s)}
            for change in found[:limit]
        ]


def _digits(number: int) -> str:
    return f"{number:0{_NUMBER_DIGITS}}"
