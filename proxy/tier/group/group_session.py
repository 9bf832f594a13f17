"""The session of a group's member: until when the brokers keep it, and what is wrong with it."""

from structlog import get_logger

_log = get_logger(__name__)


class GroupSession:
    """What a member knows of its session, by its own clock; times are in seconds."""

    def __init__(self, group_id: str, timeout_s: float) -> None:
        self._group_id, self._timeout_s = group_id, timeout_s
        self.ends_s: float | None = None
        """Until when the brokers keep the member at least; None: there is no session."""
        self.problem: str | None = None
        """Why the member is not in the tier, or may soon be out of it; None: it is in."""
        self._has_failed = False
        """Whether the last try to reach the coordinator failed, which by itself is no problem."""

    def extend(self, sent_s: float) -> None:
        """Begin the session anew, as of a request that was sent then and is answered."""
        self.ends_s = max(sent_s + self._timeout_s, self.ends_s or 0.0)

    def failed(self, error: str) -> None:
        """Count a try that failed. One by itself is no problem: coordinators move."""
        if self._has_failed:
            self.set_problem(error)
        self._has_failed = True

    def set_problem(self, problem: str | None) -> None:
        """Log a problem, and when it is over."""
        self._has_failed = False
        if problem is not None and problem != self.problem:
            _log.warning("not sure of the tier", group=self._group_id, error=problem)
        elif problem is None and self.problem is not None:
            _log.info("in the tier again", group=self._group_id)
        self.problem = problem
