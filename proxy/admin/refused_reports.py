"""Records tokens that report on queries that are not theirs; seldom, so that the audit has room.

It keeps so many entries, and whoever has a token may send reports all day.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from structlog import get_logger

from proxy.admin.audit import AuditLog, Author

REFUSAL_INTERVAL_S = 86_400.0
"""Between two records of the same refusal."""

RECORDED = 10
"""In REFUSAL_INTERVAL_S, of one token; further ones are only counted."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RefusedReports:
    """What was refused to each token, and when; times are since the epoch."""

    audit: AuditLog
    _recorded_s: defaultdict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(dict), init=False
    )
    """By the token's name and what was said to it."""

    async def record(self, who: Author, refusal: str, now_s: float) -> None:
        """Record in log and audit what was refused, unless that, or too much, was lately."""
        recorded_s = self._recorded_s[who.name]
        for text in [
            each for each, at_s in recorded_s.items() if now_s - at_s >= REFUSAL_INTERVAL_S
        ]:
            del recorded_s[text]
        if refusal in recorded_s or len(recorded_s) >= RECORDED:
            return
        recorded_s[refusal] = now_s
        _log.warning("report refused", problem=refusal, who=who.name, remote=who.address)
        await self.audit.record(who, "report refused", None, refusal, now_s)
