"""Makes a change of an operator: records it, logs who made it, and refuses what cannot be made."""

from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from structlog import get_logger

from proxy.admin.audit import AuditLog
from proxy.admin.port.guard import current_author
from proxy.admin.replies import ApiError
from proxy.state import StateError

REFUSAL_INTERVAL_S = 86_400.0
"""Between two records of the same refusal."""

RECORDED = 10
"""In REFUSAL_INTERVAL_S, of one token; further ones are only counted."""

_log = get_logger(__name__)


@asynccontextmanager
async def audited(
    audit: AuditLog, what: str, get: Callable[[], object], fix: str = ""
) -> AsyncIterator[None]:
    """Record the change that the body makes to what `get` returns; see AuditLog.recording.

    Raises ApiError for the body's ValueError, which `fix` mends, and where it cannot be stored.
    """
    try:
        async with audit.recording(current_author(), what, get):
            yield
    except ValueError as error:
        raise ApiError(400, str(error), fix) from None
    except StateError as error:
        raise ApiError(503, error.what, error.fix) from error


def log_change(event: str, level: str = "info", /, **about: object) -> None:
    """Log a change, and who has made it."""
    who = current_author()
    getattr(_log, level)(event, **about, who=who.name, remote=who.address)


@dataclass(frozen=True, slots=True)
class RefusedReports:
    """Records tokens that report on queries that are not theirs; times are since the epoch.

    Seldom, so that the audit has room: whoever has a token may send reports all day.
    """

    audit: AuditLog
    _recorded_s: defaultdict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(dict), init=False
    )
    """By the token's name and what was said to it."""

    async def record(self, refusal: str, now_s: float) -> None:
        """Record in log and audit what was refused, unless that, or too much, was lately."""
        who = current_author()
        recorded_s = self._recorded_s[who.name]
        for text, at_s in tuple(recorded_s.items()):
            if now_s - at_s >= REFUSAL_INTERVAL_S:
                del recorded_s[text]
        if refusal in recorded_s or len(recorded_s) >= RECORDED:
            return
        recorded_s[refusal] = now_s
        log_change("report refused", "warning", problem=refusal)
        await self.audit.record(who, "report refused", None, refusal, now_s)
