"""What the command `check` prints of a sound configuration: hints, and the rules of a client."""

from collections.abc import Iterator

from metrics.clock import MS_PER_SECOND
from proxy.config.durations import format_duration
from proxy.config.models import HIDE_PASSWORD, Config
from proxy.config.pipeline_advice import find_advice
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.gaps import find_gaps
from proxy.quota.rules import AdaptiveBound, RuleTable


def find_hints(config: Config, table: RuleTable) -> Iterator[str]:
    """Yield a line for each thing that is not wrong and that its author should know of."""
    if config.quotas.source == "kafka":
        yield "quotas.source is kafka: the cluster's own quotas come on top, and are not shown here"
    else:
        names = [listener.name for listener in config.listeners]
        yield from find_gaps(table, names, config.limits.max_client_entities)
    if config.cluster.shows_password:
        yield f"cluster.sasl sends the password to the brokers in the clear; fix: {HIDE_PASSWORD}"
    if config.state.kind == "memory" and any(rule.adaptive for rule in config.quotas.rules):
        yield (
            "state.kind is memory: after a restart of the proxy the first batch of each adaptive "
            "query is not bounded; fix: write sqlite or kafka"
        )
    yield from find_advice(config, table)


def explain(config: Config, table: RuleTable, identity: ClientIdentity) -> Iterator[str]:
    """Yield which query a client is, and for each quota type its bound and the rules behind it."""
    yield (
        f"client: listener={identity.listener} user={identity.user or '(anonymous)'} "
        f"client-id={identity.client_id or '(none)'}"
    )
    for query in config.queries:
        if query.client_id == identity.client_id:
            group = f", commits to {query.commit_group}" if query.commit_group else ""
            yield f"query: {query.name}{group}"
    candidates = table.explain(identity)
    for kind in QuotaKind:
        of_kind = [candidate for candidate in candidates if candidate.kind is kind]
        chosen = next((candidate.rule for candidate in of_kind if candidate.chosen), None)
        yield f"{kind}: {kind.unit.format(chosen.bounds[kind]) if chosen else 'no limit'}"
        if chosen and chosen.adaptive and kind is QuotaKind.CONSUMER_BYTE_RATE:
            yield f"     {_adaptive(chosen.adaptive)}"
        for candidate in of_kind:
            mark = "->" if candidate.chosen else "  "
            yield f"  {mark} {candidate.rule.title}: {candidate.reason}"


def _adaptive(adaptive: AdaptiveBound) -> str:
    most = f" to {adaptive.max_rate:g}" if adaptive.max_rate is not None else " or more"
    interval = "the interval that they show"
    if adaptive.batch_interval_ms is not None:
        interval = format_duration(adaptive.batch_interval_ms / MS_PER_SECOND)
    return (
        f"adaptive: that at most; follows the query's batches of {interval} by their "
        f"{adaptive.estimator}, {adaptive.min_rate:g}{most} records per second"
    )
