"""What valid rules leave open to clients that no rule names."""

from collections.abc import Iterator, Sequence

from .entities import DEFAULT, ClientIdentity, QuotaKind
from .rules import Rule, RuleTable

NOBODY = ""
"""A user that no rule names."""


def find_gaps(table: RuleTable, listeners: Sequence[str], max_entities: int) -> Iterator[str]:
    """Yield a line if nothing bounds such clients, and one if new client ids bring new quotas.

    `max_entities`: for how many clients each kind of quota keeps a sensor of their own.
    """
    unbounded = [name for name in listeners if not any(_rules(table, name, None))]
    if unbounded:
        login = (
            " and do not log in" if all(any(_rules(table, n, NOBODY)) for n in unbounded) else ""
        )
        where = "" if len(unbounded) == len(listeners) else f" on listener {', '.join(unbounded)}"
        yield (
            f"no rule bounds clients that no rule names{login}{where}; fix: add "
            f"{{client-id: {DEFAULT}, ...}}, which is for all of them"
        )
    fresh = {
        rule.number: rule.title
        for name in listeners
        for rule in _rules(table, name, NOBODY)
        if _counts_ids(rule)
    }
    if fresh:
        titles = ", ".join(fresh[number] for number in sorted(fresh))
        yield (
            f"{titles}: with each new client id a client gets this quota anew, up to "
            f"{max_entities} times (limits.max_client_entities); fix: scope: shared, or, where "
            f"clients log in, a rule with user: {DEFAULT}"
        )


def _rules(table: RuleTable, listener: str, user: str | None) -> Iterator[Rule]:
    """Yield the rules that bound a client whose user and client id no rule names."""
    client = ClientIdentity(listener, user, None)
    matches = (table.match(kind, client) for kind in QuotaKind)
    return (match.rule for match in matches if match is not None)


def _counts_ids(rule: Rule) -> bool:
    """Return whether a rule gives each client id that it does not name a quota of its own."""
    return rule.is_open and (rule.client_id == DEFAULT or set(rule.keys) == {"listener"})
