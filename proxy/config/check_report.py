"""What the command `check` prints of a sound configuration.

Hints, the rules of a client, what each share of a budget comes to, and what is not in force.
"""

import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from metrics.clock import MS_PER_SECOND
from proxy.config.descriptors import share_descriptors
from proxy.config.document import key_path
from proxy.config.endpoints import MACHINE_PLACEHOLDER, ip_address
from proxy.config.files import find_exposed
from proxy.config.models import HIDE_PASSWORD, Config
from proxy.config.secrets import PUBLIC_FILES, named_files
from proxy.pipeline.graph import PipelineGraph, find_permanent_holds
from proxy.quota.entities import (
    DEFAULT,
    FORESEEN_KINDS,
    MAX_CLIENT_ID_CHARS,
    TRAFFIC_KINDS,
    ClientIdentity,
    QuotaKind,
)
from proxy.quota.fields import fields_of, yaml_key
from proxy.quota.rules import AdaptiveSettings, Budget, QuotaManagerSettings, Rule, RuleTable, Share
from proxy.quota.scheduled_rules import ScheduledSettings, by_title
from proxy.quota.shares import Claim, divide_fairly
from proxy.quota.validation import TOPIC_KEYS
from proxy.quota.values import SIZE_UNITS, format_ms, format_size, shown

REQUEST_TIMEOUT_S = 30.0
"""Kafka's default of `request.timeout.ms`: after so long clients give up on a request."""

SHOWN_SHARES = 3
"""So many workers' ports are written out."""

INDENT = "  "

NOBODY = ""
"""A user that no rule names."""


def find_hints(config: Config, table: RuleTable) -> Iterator[str]:
    """Yield a line for each thing that is not wrong and that its author should know of."""
    if config.quotas.source == "kafka":
        yield "quotas.source is kafka: the cluster's own quotas come on top, and are not shown here"
    else:
        names = [listener.name for listener in config.listeners]
        yield from find_rule_gaps(table, names, config.limits.max_client_entities)
    yield from find_unenforced(config.quota_settings)
    if config.cluster.shows_password:
        yield f"cluster.sasl sends the password to the brokers in the clear; fix: {HIDE_PASSWORD}"
    yield from find_startup_hints(config)
    yield from find_loops_to_self(config)
    if config.state.kind == "memory" and any(rule.adaptive for rule in config.quotas.rules):
        loss = "after a restart of the proxy the first batch of each adaptive query is not bounded"
        yield f"state.kind is memory: {loss}; fix: write sqlite or kafka"
    yield from find_worker_port_hints(config)
    yield from find_hosts_without_machine(config)
    yield from find_pipeline_hints(config, table)


def find_startup_hints(config: Config) -> Iterator[str]:
    """Yield a line for each thing that a start logs as well: what is surely not wanted so."""
    if config.throttle.max_delay_ms >= REQUEST_TIMEOUT_S * MS_PER_SECOND:
        held = format_ms(config.throttle.max_delay_ms)
        yield (
            f"{config.place('throttle.max_delay')}: throttle.max_delay is {held}, and clients give "
            f"up on a request and ask again after request.timeout.ms, {REQUEST_TIMEOUT_S:g} s by "
            "default; fix: write 20s; what is left of a hold goes into the next one"
        )
    yield from find_unfit_names(config)
    if (hint := share_descriptors(config).hint) is not None:
        yield hint
    yield from find_exposed(named_files(config, but=PUBLIC_FILES))
    if not config.admin.read_needs_token:
        for number, token in enumerate(config.admin.tokens):
            if set(token.rights) == {"read"}:
                use = "allows only what all may do; fix: write read_needs_token: true"
                yield f"admin.tokens[{number}] ({token.name}) {use}, or remove it"


def find_loops_to_self(config: Config) -> Iterator[str]:
    """Yield a line for each bootstrap server that clients take for this proxy."""
    for server in config.cluster.bootstrap_servers:
        for listener in config.listeners:
            ports = listener.broker_ports
            is_broker = ports is not None and ports.first <= server.port <= ports.last
            host = config.named(listener.advertised_host)
            if (is_broker or server.port == listener.bind.port) and server.host == host:
                yield (
                    f"cluster.bootstrap_servers: {server} is where clients find listener "
                    f"{listener.name}; fix, if it leads there from here as well: write the address "
                    "of a broker, or the proxy would connect to itself"
                )


def find_unfit_names(config: Config) -> Iterator[str]:
    """Yield a line for each name with blanks at an end, and for each client id that none has."""
    rules = ((f"quotas.rules[{at}]", rule) for at, rule in enumerate(config.quotas.rules))
    queries = ((f"queries[{at}]", query) for at, query in enumerate(config.queries))
    for path, section in (*rules, *queries):
        client_ids = {getattr(section, key, None) for key in ("client_id", "client_id_prefix")}
        for name, field in (fields_of(type(section)) or {}).items():
            value, key = getattr(section, name), f"{path}.{field.alias or yaml_key(name)}"
            if not isinstance(value, str) or not (place := config.place(key)):
                continue
            if value != value.strip():
                yield (
                    f"{place}: {key} is {shown(value)}, with blanks at an end, and fits only what "
                    f"has them too; fix: write {shown(value.strip())}"
                )
            if len(value) > MAX_CLIENT_ID_CHARS and value in client_ids:
                yield (
                    f"{place}: {key} is {shown(value)}, which fits no client: of an id the proxy "
                    f"knows {MAX_CLIENT_ID_CHARS} characters; fix: use a shorter id, or a shorter "
                    "client-id-prefix"
                )


def find_unenforced(settings: QuotaManagerSettings) -> Iterator[str]:
    """Yield a line if there are clients that are measured and held for nothing."""
    counted = "what would be is counted in kafka_quota_proxy_would_throttle_total"
    if not settings.enforce:
        yield f"throttle.enforce is false: no client is held, {counted}"
    elif titles := ", ".join(rule.title for rule in settings.rules if not rule.enforce):
        yield f"{titles}: enforce is false, so their clients are not held; {counted}"


def find_rule_gaps(table: RuleTable, listeners: Sequence[str], max_entities: int) -> Iterator[str]:
    """Yield a line if nothing bounds such clients, and one if new client ids bring new quotas.

    `max_entities`: for how many clients each kind of quota keeps a sensor of their own.
    """
    unbounded = [name for name in listeners if not _rules_of_unnamed(table, name, None)]
    if unbounded:
        bounds_users = all(_rules_of_unnamed(table, name, NOBODY) for name in unbounded)
        login = " and do not log in" if bounds_users else ""
        where = "" if len(unbounded) == len(listeners) else f" on listener {', '.join(unbounded)}"
        yield (
            f"no rule bounds clients that no rule names{login}{where}; fix: add "
            f"{{client-id: {DEFAULT}, ...}}, which is for all of them"
        )
    fresh = {
        rule.number: rule.title
        for name in listeners
        for rule in _rules_of_unnamed(table, name, NOBODY)
        if rule.is_open and (rule.client_id == DEFAULT or rule.names_only_a_listener)
    }
    if fresh:
        titles = ", ".join(fresh[number] for number in sorted(fresh))
        yield (
            f"{titles}: with each new client id a client gets this quota anew, up to "
            f"{max_entities} times (limits.max_client_entities); fix: scope: shared, or, where "
            f"clients log in, a rule with user: {DEFAULT}"
        )


def _rules_of_unnamed(table: RuleTable, listener: str, user: str | None) -> list[Rule]:
    """Return the rules that bound the traffic of a client that no rule names."""
    client = ClientIdentity(listener, user, None)
    matches = (table.match(kind, client) for kind in TRAFFIC_KINDS)
    return [match.rule for match in matches if match is not None]


def rules_for_client_id(
    config: Config, table: RuleTable, kind: QuotaKind, client_id: str
) -> list[Rule]:
    """Return the rules that may bound a client, whoever its user is and wherever it comes in."""
    found: dict[int, Rule] = {}
    for user in {None, *(rule.user for rule in table.rules)}:
        for listener in config.listeners:
            match = table.match(kind, ClientIdentity(listener.name, user, client_id))
            if match is not None:
                found[match.rule.number] = match.rule
    return [found[number] for number in sorted(found)]


def find_worker_port_hints(config: Config) -> Iterator[str]:
    """Yield a line for each listener, how its workers share the ports of brokers."""
    workers = config.worker_count
    for listener in config.listeners if workers > 1 else ():
        ports, place = listener.broker_ports, f"workers: {workers}, listener {listener.name}"
        if ports is None:
            continue
        if ports.any_free:
            yield f"{place}: each worker takes any free port for each broker"
        elif listener.sni is not None:
            last = ports.first + workers - 1
            yield f"{place}: the workers have ports {ports.first} to {last}, with all brokers each"
        else:
            share, *more = (ports.share(workers, number) for number in range(workers))
            parts = ", ".join(map(str, (share, *more[: SHOWN_SHARES - 1])))
            parts += ", ..." if workers > SHOWN_SHARES else ""
            ids = "id 0" if len(share) == 1 else f"ids 0 to {len(share) - 1}"
            yield (
                f"{place}: each worker has {share.count} ({parts}), for brokers with {ids}; fix, "
                "if there are others: widen broker_ports"
            )


def find_hosts_without_machine(config: Config) -> Iterator[str]:
    """Yield a line for each name that a file which is the same on all machines gives to all."""
    tier = config.tier
    for listener in config.listeners if tier is not None else ():
        for loc, name in listener.names.items():
            if tier and MACHINE_PLACEHOLDER not in name and not _is_of(name, tier.machine):
                yield (
                    f"tier: {tier.name}, listener {listener.name}: {key_path(loc)} {name} does not "
                    f"say which machine it is, and must lead to {tier.machine} alone; fix, if "
                    f"other machines have it too: write {MACHINE_PLACEHOLDER} in it"
                )


def _is_of(name: str, machine: str) -> bool:
    """Return whether a name has the machine's in it, or is an address of this computer."""
    address = ip_address(name)
    if address is None:
        return machine.lower() in name.lower().split(".")
    if address.is_loopback:  # all machines are on this computer, as in a trial
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True


def find_pipeline_hints(config: Config, table: RuleTable) -> Iterator[str]:
    """Yield a line for each node that may have to wait and cannot be held, or for good."""
    client_of = {query.name: query.client_id for query in config.queries}
    for settings in config.pipelines:
        graph = PipelineGraph(settings)
        nodes = [
            (f"stage {name!r}", client_of.get(member, member), True)
            for name, stage in graph.stages.items()
            if graph.downstream[name] or (settings.max_pending and name in graph.first)
            for member in stage.members
        ]
        if settings.hold_producers:
            sources = (source.client_id for source in settings.sources)
            nodes += [(f"source {client_id!r}", client_id, False) for client_id in sources]
        for node, client_id, reads in nodes:
            kind = QuotaKind.CONSUMER_BYTE_RATE if reads else QuotaKind.PRODUCER_BYTE_RATE
            rules = rules_for_client_id(config, table, kind, client_id)
            if not any(rule.adaptive or not reads for rule in rules):
                lack = f"{kind} and adaptive" if reads else kind
                yield (
                    f"pipeline {settings.name!r}: {node} cannot be held, no rule gives client-id "
                    f"{client_id!r} a {lack}"
                )
        yield from find_permanent_holds(graph)


def explain_rules_of_client(
    config: Config, table: RuleTable, identity: ClientIdentity
) -> Iterator[str]:
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
        yield f"{kind}: {kind.unit.format(chosen.ceilings[kind]) if chosen else 'no limit'}"
        if chosen and chosen.adaptive and kind is QuotaKind.CONSUMER_BYTE_RATE:
            yield f"     {_adaptive(chosen.adaptive)}"
        if chosen and chosen.share and kind in chosen.share.budget.ceilings:
            yield f"     {_share(chosen.share)}"
        for candidate in of_kind:
            mark = "->" if candidate.chosen else "  "
            yield f"  {mark} {candidate.rule.title}: {candidate.reason}"
        for rule in table.rules_by_topic(kind, identity):
            topics = ",".join(f"{key}={rule.keys[key]}" for key in TOPIC_KEYS if key in rule.keys)
            yield f"     {kind.unit.format(rule.bounds[kind])} of {topics} by {rule.title}"
        left_out = table.count(kind) - len(of_kind)
        if left_out:
            yield f"     and {left_out} more that are for other clients"


def _share(share: Share) -> str:
    guaranteed = f", {format_size(round(share.guaranteed))} guaranteed" if share.guaranteed else ""
    return f"that at most; shares {share.budget.title} with weight {share.weight:g}{guaranteed}"


def _adaptive(adaptive: AdaptiveSettings) -> str:
    most = f" to {adaptive.max_rate:g}" if adaptive.max_rate is not None else " or more"
    interval = "the interval that they show"
    if adaptive.batch_interval_ms is not None:
        interval = format_ms(adaptive.batch_interval_ms)
    return (
        f"adaptive: that at most; follows the query's batches of {interval} by their "
        f"{adaptive.estimator}, {adaptive.min_rate:g}{most} records per second"
    )


def explain_budgets(rules: Sequence[Rule]) -> Iterator[str]:
    """Yield the budgets of rules, and what their clients get: when all want more, and alone.

    A rule that has a share for each of its clients is taken to have one client.
    """
    parts: defaultdict[str, dict[str, Rule]] = defaultdict(dict)
    outermost: dict[str, Budget] = {}
    for rule in rules:
        part = rule
        for budget in rule.budgets_around():
            parts[budget.name].setdefault(part.title, part)
            part = budget
        if isinstance(part, Budget):
            outermost[part.name] = part
    for budget in outermost.values():
        for kind in sorted(FORESEEN_KINDS & budget.bounds.keys()):
            rate = kind.unit.format(budget.bounds[kind])
            yield f"{budget.title}: {kind} {rate} for all its clients together"
            yield from _explain_parts(budget, budget.bounds[kind], kind, parts, INDENT)


def _explain_parts(
    budget: Budget,
    rate: float,
    kind: QuotaKind,
    parts: dict[str, dict[str, Rule]],
    indent: str,
) -> Iterator[str]:
    members = [each for each in parts[budget.name].values() if each.share is not None]
    claims = [
        Claim(each.share.weight, each.share.guaranteed, each.ceilings[kind])
        for each in members
        if each.share is not None
    ]
    for each, share in zip(members, divide_fairly(rate, claims), strict=True):
        name = each.title if isinstance(each, Budget) else f"{each.title}, {each.shared_entity}"
        one = ", if it has one client" if each.is_open else ""
        alone = _rate(each.ceilings[kind])
        yield f"{indent}{name}: {_rate(share)} when all want more{one}; {alone} alone"
        if isinstance(each, Budget):
            yield from _explain_parts(each, share, kind, parts, indent + INDENT)


def _rate(rate: float) -> str:
    return f"{rate / SIZE_UNITS['MiB']:.4g}MiB per second"


def explain_out_of_force(settings: QuotaManagerSettings, at_s: float) -> Iterator[str]:
    """Yield a line for each rule and budget that is not in force at a time of the Unix epoch."""
    now, at = ScheduledSettings.at(settings, at_s), datetime.fromtimestamp(at_s, UTC)
    in_force = {frozenset(rule.keys.items()): rule for rule in now.settings.rules}
    numbers = {rule.number for rule in now.settings.rules}
    for title, part in by_title(settings.rules).items():
        if part.when is not None and not now.scheduled[title]:
            begin = part.when.next_change(at)
            then = "" if begin is None else f"; it is from {part.when.clock(begin)} on"
            then += f" ({part.when})"
        elif isinstance(part, Budget) or part.number in numbers:
            continue
        elif (other := in_force.get(frozenset(part.keys.items()))) and other.when is not None:
            then = f": {other.title} is for the same clients, and goes first ({other.when})"
        else:
            then = ": no budget that it is in has a rate then, and it has none of its own"
        yield f"{title} is not in force at {at:%Y-%m-%dT%H:%MZ}{then}"
