"""Log what an operator should see of the tier, each thing once."""

from collections.abc import Mapping

from structlog import get_logger

from .group_documents import Assignment, RefusedMember

CLOCKS_APART_S = 300.0
"""Clocks further apart are worth a warning; times in records are by their writers' clocks."""

_log = get_logger(__name__)


class TierLog:
    """What was said of one group, as its member sees it."""

    def __init__(self, group_id: str) -> None:
        self._group_id = group_id
        self._digests: dict[str, list[str]] = {}
        self._is_apart = False
        self._refused: Mapping[str, RefusedMember] = {}
        self._has_failed = False
        self.problem: str | None = None
        """What is wrong now; None: nothing is."""

    def failed(self, error: str) -> None:
        """Count a try that failed. One by itself is no problem: coordinators move."""
        if self._has_failed:
            self.problem_is(error)
        self._has_failed = True

    def problem_is(self, problem: str | None) -> None:
        """Log a problem, and when it is over."""
        self._has_failed = False
        if problem is not None and problem != self.problem:
            _log.warning("not sure of the tier", group=self._group_id, error=problem)
        elif problem is None and self.problem is not None:
            _log.info("in the tier again", group=self._group_id)
        self.problem = problem

    def tier_is(self, assignment: Assignment, member_id: str) -> None:
        """Log what is odd about the other members: rules, clocks, refusals."""
        digests = assignment.rules_digests
        if len(digests) > 1 and digests != self._digests:
            _log.warning("machines of the tier have different rules", machines_by_digest=digests)
        self._digests = digests
        is_apart = assignment.clocks_apart_s > CLOCKS_APART_S
        if is_apart and not self._is_apart:
            clocks = {name: each.clock_s for name, each in assignment.members.items()}
            _log.warning("clocks of the tier are far apart", clock_s_by_machine=clocks)
        self._is_apart = is_apart
        for key, refusal in assignment.refused.items():
            if key != member_id and self._refused.get(key) != refusal:
                text = "the tier refuses a machine"
                _log.warning(text, machine=refusal.name, reason=refusal.reason)
        self._refused = assignment.refused
