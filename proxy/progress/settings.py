"""What the registry is told: which queries are configured, and the bounds."""

from dataclasses import dataclass

STUCK_AFTER_MS = 300_000.0
"""By default, how long nothing may complete while there is lag."""

MAX_QUERIES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySettings:
    """One query of the configuration. Raises ValueError for a value out of range."""

    name: str
    client_id: str
    commit_group: str | None = None
    """The consumer group that completed offsets are committed to; None: to none."""
    stuck_after_ms: float = STUCK_AFTER_MS
    """Above 0."""

    def __post_init__(self) -> None:
        if not (self.name and self.client_id):
            raise ValueError("a query needs a name and a client id")
        if not self.stuck_after_ms > 0:
            raise ValueError(f"stuck_after_ms must be above 0, not {self.stuck_after_ms}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSettings:
    """The configured queries and how many there may be at all.

    Raises ValueError when two share a name, a client id or a commit group, or `max_queries` is
    below 1.
    """

    queries: tuple[QuerySettings, ...] = ()
    max_queries: int = MAX_QUERIES
    """With those that only reports or rules name. The configured ones are always followed."""

    def __post_init__(self) -> None:
        if self.max_queries < 1:
            raise ValueError(f"max_queries must be 1 or more, not {self.max_queries}")
        for what in ("name", "client_id", "commit_group"):
            given = [getattr(query, what) for query in self.queries]
            given = [value for value in given if value is not None]
            if len(set(given)) != len(given):
                raise ValueError(f"two queries share a {what}")
