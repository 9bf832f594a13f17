"""What the sections of a sound configuration must keep to among each other."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from proxy.config import endpoints
from proxy.config.models import AUTO, Config
from proxy.pipeline import graph
from proxy.quota.fields import (
    OTHER_PLACE,
    Loc,
    SectionProblem,
    find_repeated,
    find_unknown_names,
    find_used_twice,
)
from proxy.quota.values import shown


@dataclass(frozen=True, slots=True)
class _PortClaim:
    loc: Loc
    owner: str
    host: str
    ports: endpoints.PortRange

    def __str__(self) -> str:
        ports = self.ports
        what = f"port {ports.first}" if ports.first == ports.last else f"ports {ports}"
        return f"{what} of {self.owner}"

    def clashes_with(self, other: "_PortClaim") -> bool:
        overlap = self.ports.first <= other.ports.last and other.ports.first <= self.ports.last
        return overlap and _hosts_meet(self.host, other.host)


def find_config_problems(config: Config) -> Iterator[SectionProblem]:
    """Yield what is wrong between the sections; each of them is sound by itself."""
    yield from find_used_twice(("listeners",), config.listeners, "name", "listener")
    claims = list(_claims(config))
    for earlier, claim in combinations(claims, 2):
        if claim.clashes_with(earlier):
            message = f"{claim} and {earlier} ({OTHER_PLACE}) overlap"
            yield SectionProblem(
                claim.loc, message, "choose ports that do not overlap", earlier.loc
            )
    yield from _own_servers(config, claims)
    for key in ("name", "commit_group"):
        yield from find_used_twice(("queries",), config.queries, key, "query")
    yield from _same_clients(config)
    yield from find_used_twice(("pipelines",), config.pipelines, "name", "pipeline")
    yield from find_used_twice(("admin", "tokens"), config.admin.tokens, "name", "token")
    yield from dict.fromkeys(graph.find_shared_members(config.pipelines))
    nodes = sum(len(each.sources) + len(each.stages) for each in config.pipelines)
    most = config.limits.max_client_entities
    counts = ("queries", "names {} queries", len(config.queries))
    for section, what, count in (counts, ("pipelines", "have {} sources and stages", nodes)):
        if count > most:
            message = f"{what.format(count)}, more than limits.max_client_entities, {most}"
            fix = "remove some, or raise limits.max_client_entities"
            yield SectionProblem((section,), message, fix)
    usage, state = config.usage, config.state
    if usage is not None and state.kind == "kafka" and usage.topic == state.topic:
        fix = "write another name, such as quota-proxy-usage"
        yield SectionProblem(("usage", "topic"), "is also the topic of the state", fix)
    names = [listener.name for listener in config.listeners]
    asked = enumerate(rule.listener for rule in config.quotas.rules)
    located = ((("quotas", "rules", at, "listener"), name) for at, name in asked)
    yield from find_unknown_names(located, names, "listener")
    yield from _too_few_ports(config)
    yield from _tier_conflicts(config) if config.tier else _names_without_tier(config)


def _claims(config: Config) -> Iterator[_PortClaim]:
    """Yield the ports that are taken for certain."""
    for at, listener in enumerate(config.listeners):
        owner = f"listener {shown(listener.name)}"
        loc, bind, ports = ("listeners", at), listener.bind, listener.broker_ports
        if bind.port:
            one = endpoints.PortRange(bind.port, bind.port)
            yield _PortClaim((*loc, "bind"), owner, bind.host, one)
        if ports is not None and not ports.any_free:
            yield _PortClaim((*loc, "broker_ports"), owner, bind.host, ports)
    if config.admin.bind.port:
        bind = config.admin.bind
        # Behind the one that all share each of several members has one of its own.
        own = config.worker_count if config.worker_count > 1 else 0
        ports = endpoints.PortRange(bind.port, bind.port + own)
        yield _PortClaim(("admin", "bind"), "the admin server", bind.host, ports)


def _own_servers(config: Config, claims: Iterable[_PortClaim]) -> Iterator[SectionProblem]:
    """Yield that a bootstrap server is this proxy: it would connect to itself without end."""
    for at, server in enumerate(config.cluster.bootstrap_servers):
        for claim in claims:
            ports = claim.ports
            if ports.first <= server.port <= ports.last and _is_reached_at(claim.host, server.host):
                message = f"{shown(str(server))}, {claim}, is this proxy itself"
                loc = ("cluster", "bootstrap_servers", at)
                yield SectionProblem(loc, message, "write the address of a broker")
                break


def _hosts_meet(one: str, other: str) -> bool:
    """Whether a port taken on one host is taken on the other; a name may be of either family."""
    address, other_address = map(endpoints.literal_ip_of, (one, other))
    if address is None or other_address is None:
        known = address or other_address
        return one == other or (known is not None and known.is_unspecified)
    if address.version != other_address.version:
        return False
    return address == other_address or address.is_unspecified or other_address.is_unspecified


def _is_reached_at(bound: str, host: str) -> bool:
    """Whether what is bound to one host is for certain reached at the other from this machine."""
    address, other = map(endpoints.literal_ip_of, (bound, host))
    if address is None or other is None:
        return bound == host
    is_any = address.is_unspecified and (other.is_loopback or other.is_unspecified)
    return address == other or (is_any and address.version == other.version)


def _same_clients(config: Config) -> Iterator[SectionProblem]:
    queries = config.queries
    clients = ((("queries", at), query.client_id) for at, query in enumerate(queries))
    for loc, client_id, earlier in find_repeated(clients):
        pair = [queries[int(each[1])] for each in (loc, earlier)]
        # Where both are left out the names are the same, and that has been said.
        if any(query.client_id != query.name for query in pair):
            message = f"{shown(client_id)} is also the client-id of {OTHER_PLACE}"
            fix = "give each query a client-id of its own; it is the name where none is written"
            yield SectionProblem((*loc, "client-id"), message, fix, earlier)


def _too_few_ports(config: Config) -> Iterator[SectionProblem]:
    """Yield that there are fewer ports for brokers, or behind the admin port, than workers."""
    workers, highest = config.worker_count, endpoints.MAX_PORT
    those = f"{workers} workers" + (" (auto)" if config.workers == AUTO else "")
    if workers > 1 and config.admin.bind.port + workers > highest:
        message = f"{those} need as many ports behind it, and {highest} is the last one"
        yield SectionProblem(("admin", "bind"), message, f"write a port up to {highest - workers}")
    for at, listener in enumerate(config.listeners if workers > 1 else ()):
        loc, ports = ("listeners", at, "broker_ports"), listener.broker_ports
        if ports is None:
            message = f"is missing, and each of {those} needs a port of its own"
            fix = f"add it with {workers} ports, for example: broker_ports: 19100-"
            yield SectionProblem(loc, message, fix + str(19099 + workers))
        elif not ports.any_free and len(ports) < workers:
            message = f"{ports} has {ports.count}, too few for {those}"
            each = "one for each worker" + ("" if listener.sni else " and broker")
            fix = f"write {workers} ports or more, {each}, or fewer workers"
            yield SectionProblem(loc, message, fix)


def _tier_conflicts(config: Config) -> Iterator[SectionProblem]:
    """Yield that machines of a tier cannot read its state, or may not ask each other."""
    kind, admin = config.state.kind, config.admin
    if kind != "kafka":
        message = f"needs state.kind: kafka, which all its machines can read, not {kind}"
        yield SectionProblem(("tier",), message, "write state: {kind: kafka, topic: NAME}")
    is_guarded = bool(admin.tokens) or not admin.bind.is_loopback
    if is_guarded and admin.token_file is None:
        message = "needs admin.token_file: with its token the machines ask each other"
        yield SectionProblem(("tier",), message, "write one token for all into that file")


def _names_without_tier(config: Config) -> Iterator[SectionProblem]:
    """Yield that there are several workers without a tier, and names of its machines."""
    if config.worker_count > 1:
        message = f"{config.worker_count} workers are members of a tier, and there is no tier"
        fix = "add tier: {name: NAME} and state: {kind: kafka, topic: NAME}, or 1 worker"
        yield SectionProblem(("workers",), message, fix)
    for at, listener in enumerate(config.listeners):
        for keys, name in listener.names.items():
            if endpoints.MACHINE_PLACEHOLDER in name:
                message = f"{shown(name)} names a machine of a tier, and there is no tier"
                fix = "add tier: {name: NAME}, or write the name"
                yield SectionProblem(("listeners", at, *keys), message, fix)
