"""What keeps a query's batches from being shaped as its rule says, in words and with the mend."""

from collections.abc import Callable

from metrics.clock import MS_PER_SECOND
from proxy.progress.events import ProgressEventKind
from proxy.progress.query import FollowedQuery
from proxy.progress.report import TriggerKind
from proxy.quota.entities import DEFAULT, ClientIdentity
from proxy.quota.rules import Rule, RuleTable

OUTSIDE = (
    "it reads past this proxy, as far as is known: no rule names its client id, and no such client "
    "has connected; nothing is bounded there. Say which queries are meant with "
    "QuotaListener(queries=[...]), or let it read through this proxy and add a rule for it"
)
"""Of a query that may be meant to be left alone."""

UNSHAPED: dict[TriggerKind | None, str] = {
    TriggerKind.CONTINUOUS: "a continuous trigger has no batches",
    TriggerKind.AVAILABLE_NOW: "the trigger availableNow reads all there was at its start",
    TriggerKind.ONCE: "the trigger once reads all there is in one batch",
    TriggerKind.REAL_TIME: "a real-time trigger plans no batches",
    TriggerKind.OTHER: "the query's trigger is not known to this proxy",
}
"""Why no batch is shaped, by the kind of trigger."""


def update_query_advice(
    query: FollowedQuery,
    table: RuleTable,
    rule: Rule | None,
    *,
    is_followed: bool,
    knows_client: Callable[[str], bool],
    now_ms: float,
) -> None:
    """Set the advice to a query whose present run was just reported, and whether it is outside.

    Costs a walk over all rules.

    `rule`: that of its client; None without an adaptive one or a connection. `is_followed`: whether
    the configuration names it beside its rules. `knows_client`: whether an id connected lately.
    """
    rules = _rules_of(table, query.client_id)
    bounding = rules if rule is None else [rule]
    adaptive = next((each.adaptive for each in bounding if each.adaptive is not None), None)
    names = _unread(query, knows_client)
    query.is_outside = False
    if not is_followed and not any(map(_names_client, rules)):
        unnamed = _unnamed(query, table, knows_client)
        has_slip = unnamed is not None or knows_client(query.reported_name or "")
        query.is_outside = names is not None and not has_slip
        names = unnamed if names is None or query.is_outside else names
    query.advise(ProgressEventKind.NAMES, names, now_ms)
    interval = _interval(query, adaptive.batch_interval_ms) if adaptive is not None else None
    query.advise(ProgressEventKind.INTERVAL, interval, now_ms)
    trigger = UNSHAPED.get(query.trigger_kind) if adaptive is not None else None
    if trigger is not None:
        trigger += (
            ", so the adaptive rule shapes nothing and its own bound holds; give the query a "
            "processingTime trigger"
        )
    query.advise(ProgressEventKind.TRIGGER, trigger, now_ms)


def _rules_of(table: RuleTable, client_id: str) -> list[Rule]:
    """Return the rules that may bound a client, whoever its user is and wherever it comes in."""
    client = ClientIdentity("", None, client_id)
    return [rule for rule in table.rules if rule.client_id == DEFAULT or rule.names(client)]


def _names_client(rule: Rule) -> bool:
    return rule.client_id != DEFAULT or rule.adaptive is not None


def _unread(query: FollowedQuery, knows_client: Callable[[str], bool]) -> str | None:
    """Return what to do about a query that has read, but not with the client id it is known by."""
    client_id, name = query.client_id, query.reported_name
    if not query.has_read or knows_client(client_id):
        return None
    text = f"the query reads, but no client {client_id!r} has connected to this proxy: "
    if name is not None and name != client_id and knows_client(name):
        return text + (
            f"a client {name!r} has, so take the query out of QuotaListener(clients=...), or set "
            f"kafka.client.id to {client_id!r}"
        )
    return text + (
        f"set kafka.client.id to {client_id!r} and kafka.bootstrap.servers to this proxy, as "
        "client_options does, or say in QuotaListener(clients=...) which client id it has"
    )


def _unnamed(
    query: FollowedQuery, table: RuleTable, knows_client: Callable[[str], bool]
) -> str | None:
    """Return what to do about a query that nothing names; None while it may read past the proxy."""
    client_id, name = query.client_id, query.reported_name
    text = f"no rule and no query of the configuration names client-id {client_id!r}: "
    by_name = _rules_of(table, name) if name is not None and name != client_id else ()
    if rule := next(filter(_names_client, by_name), None):
        return text + (
            f"{rule.title} is for {name!r}, the query's name; let the rule, kafka.client.id "
            "and QuotaListener(clients=...) say the same client id"
        )
    if not knows_client(client_id):
        return None
    return text + (
        "add a rule for it, or let kafka.client.id and QuotaListener(clients=...) say the client "
        "id that a rule has"
    )


def _interval(query: FollowedQuery, interval_ms: float | None) -> str | None:
    real_ms, is_timed = query.trigger_interval_ms, query.trigger_kind is TriggerKind.PROCESSING_TIME
    if not (is_timed and real_ms and interval_ms) or interval_ms == real_ms:
        return None
    rule_s, real_s = interval_ms / MS_PER_SECOND, real_ms / MS_PER_SECOND
    return (
        f"batch_interval is {rule_s:g} s, but the query's trigger fires every {real_s:g} s: write "
        f"batch_interval: {real_s:g}s, or give the query processingTime='{rule_s:g} seconds'"
    )
