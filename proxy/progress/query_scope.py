"""Which queries a sender of reports may report on."""

from dataclasses import dataclass

ANY_REST = "*"
"""At the end of a pattern: names may go on in any way."""


@dataclass(frozen=True, slots=True)
class QueryScope:
    """The queries with names and client ids that a pattern matches; without patterns all."""

    patterns: tuple[str, ...] | None = None
    """Names, and beginnings of names with ANY_REST behind them; case counts."""

    def covers(self, name: str) -> bool:
        """Return whether a name or client id is one that may be reported on."""
        return self.patterns is None or any(
            name.startswith(each.removesuffix(ANY_REST))
            if each.endswith(ANY_REST)
            else name == each
            for each in self.patterns
        )


ALL_QUERIES = QueryScope()
