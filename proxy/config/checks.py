"""What rules, queries, pipelines and listeners must keep to among each other.

These checks look at the plain document, not at the models: so one bad value elsewhere in a rule or
listener does not hide them, and a user sees all mistakes at once.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Final, TypeVar

from proxy.config import endpoints, pipeline_checks, worker_ports
from proxy.config.document import ConfigProblem, Loc, YamlDocument, key_path
from proxy.config.models import AdminSection, LimitsSection, StateSection
from proxy.config.workers import count_workers, parse_workers
from proxy.quota.entities import QuotaKind
from proxy.quota.validation import RULE_KEYS, find_bound_problems, find_key_problems
from proxy.quota.values import BadValueError, shown

STATE_KEYS: Final = {"path": "sqlite", "topic": "kafka", "on_damage": "sqlite"}
"""The kind of state that has a use for the key."""
STATE_KINDS: Final = {
    "memory": "keeps nothing",
    "sqlite": "keeps state in a file",
    "kafka": "keeps state in a topic",
}

_Value = TypeVar("_Value")
_Item = tuple[Loc, Mapping[str, object]]


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


def find_file_problems(document: YamlDocument) -> Iterator[ConfigProblem]:
    """Yield what is wrong between the parts of a document, whatever else is wrong with them."""
    data = document.data
    quotas = data.get("quotas")
    rules = _items(quotas.get("rules") if isinstance(quotas, dict) else None, ("quotas", "rules"))
    listeners, queries, pipelines = (
        _items(data.get(key), (key,)) for key in ("listeners", "queries", "pipelines")
    )
    yield from _used_twice(document, listeners, "name", "listener")
    claims = [claim for item in listeners for claim in _listener_claims(item)]
    claims += _admin_claim(document)
    yield from _port_clashes(document, claims)
    yield from _own_servers(document, claims)
    for rule in rules:
        yield from _rule_alone(document, rule)
    yield from _same_rules(document, rules)
    for key in ("name", "commit_group"):
        yield from _used_twice(document, queries, key, "query")
    yield from _same_clients(document, queries)
    yield from _used_twice(document, pipelines, "name", "pipeline")
    yield from _used_twice(document, _tokens(data.get("admin")), "name", "token")
    yield from pipeline_checks.find_pipeline_problems(document)
    yield from _too_many(document, "queries", [data.get("queries")], "names {} queries")
    nodes = [pipeline.get(key) for _, pipeline in pipelines for key in ("sources", "stages")]
    yield from _too_many(document, "pipelines", nodes, "have {} sources and stages")
    yield from _unknown_listeners(document, rules, listeners)
    yield from _useless_state_keys(document)
    yield from worker_ports.find_port_problems(document, listeners)
    yield from _tier_problems(document, listeners)


def _items(value: object, loc: Loc) -> list[_Item]:
    if not isinstance(value, list):
        return []
    return [((*loc, index), item) for index, item in enumerate(value) if isinstance(item, dict)]


def _tokens(admin: object) -> list[_Item]:
    return _items(admin.get("tokens") if isinstance(admin, dict) else None, ("admin", "tokens"))


def _at(document: YamlDocument, loc: Loc) -> str:
    return f"{key_path(loc)} on line {document.line(loc)}"


def _repeated(values: Iterable[tuple[Loc, _Value]]) -> Iterator[tuple[Loc, _Value, Loc]]:
    """Yield where a value stands again, the value, and where it stands first."""
    first: dict[_Value, Loc] = {}
    for loc, value in values:
        if first.setdefault(value, loc) != loc:
            yield loc, value, first[value]


def _used_twice(
    document: YamlDocument, items: list[_Item], key: str, kind: str
) -> Iterator[ConfigProblem]:
    texts = ((loc, text) for loc, item in items if isinstance(text := item.get(key), str) and text)
    for loc, text, earlier in _repeated(texts):
        message = f"{shown(text)} is also the {key} of {_at(document, earlier)}"
        yield document.problem((*loc, key), message, f"give each {kind} a {key} of its own")


def _port_clashes(document: YamlDocument, claims: list[_PortClaim]) -> Iterator[ConfigProblem]:
    for earlier, claim in combinations(claims, 2):
        if claim.clashes_with(earlier):
            message = f"{claim} and {earlier} ({_at(document, earlier.loc)}) overlap"
            yield document.problem(claim.loc, message, "choose ports that do not overlap")


def _own_servers(document: YamlDocument, claims: list[_PortClaim]) -> Iterator[ConfigProblem]:
    """Yield that a bootstrap server is this proxy: it would connect to itself without end."""
    cluster = document.data.get("cluster")
    servers = cluster.get("bootstrap_servers") if isinstance(cluster, dict) else None
    for number, server in enumerate(servers if isinstance(servers, list) else ()):
        place = _parsed(endpoints.parse_endpoint, server)
        if place is None:
            continue
        for claim in claims:
            ports = claim.ports
            if ports.first <= place.port <= ports.last and _is_reached_at(claim.host, place.host):
                loc = ("cluster", "bootstrap_servers", number)
                message = f"{shown(server)}, {claim}, is this proxy itself"
                yield document.problem(loc, message, "write the address of a broker")
                break


def _listener_claims(item: _Item) -> Iterator[_PortClaim]:
    loc, listener = item
    owner = f"listener {shown(listener.get('name'))}"
    bind = _parsed(endpoints.parse_bind, listener.get("bind"))
    if bind is None:
        return
    if bind.port:
        ports = endpoints.PortRange(bind.port, bind.port)
        yield _PortClaim((*loc, "bind"), owner, bind.host, ports)
    of_brokers = _parsed(endpoints.parse_broker_ports, listener.get("broker_ports"))
    if of_brokers is not None and not of_brokers.any_free:
        yield _PortClaim((*loc, "broker_ports"), owner, bind.host, of_brokers)


def _admin_claim(document: YamlDocument) -> Iterator[_PortClaim]:
    admin = document.data.get("admin", {})
    if not isinstance(admin, dict):
        return
    default: endpoints.HostPort = AdminSection.model_fields["bind"].default
    bind = _parsed(endpoints.parse_bind, admin.get("bind", str(default)))
    if bind is not None and bind.port:
        ports = endpoints.PortRange(bind.port, bind.port)
        yield _PortClaim(("admin", "bind"), "the admin server", bind.host, ports)


def _parsed(parse: Callable[[object], _Value], value: object) -> _Value | None:
    """Parse a value; None when it is bad, which its model says better."""
    try:
        return parse(value)
    except BadValueError:
        return None


def _hosts_meet(one: str, other: str) -> bool:
    """Whether a port taken on one host is taken on the other; a name may be of either family."""
    address, other_address = (
        endpoints.ip_address("127.0.0.1" if host == "localhost" else host) for host in (one, other)
    )
    if address is None or other_address is None:
        known = address or other_address
        return one == other or (known is not None and known.is_unspecified)
    if address.version != other_address.version:
        return False
    return address == other_address or address.is_unspecified or other_address.is_unspecified


def _is_reached_at(bound: str, host: str) -> bool:
    """Whether what is bound to one host is for certain reached at the other from this machine."""
    address, other = (
        endpoints.ip_address("127.0.0.1" if each == "localhost" else each) for each in (bound, host)
    )
    if address is None or other is None:
        return bound == host
    is_any = address.is_unspecified and (other.is_loopback or other.is_unspecified)
    return address == other or (is_any and address.version == other.version)


def _rule_alone(document: YamlDocument, item: _Item) -> Iterator[ConfigProblem]:
    loc, rule = item
    keys = [key for key in RULE_KEYS if key in rule]
    problems = [*find_key_problems(keys)]
    adaptive = rule.get("adaptive") is not None
    if adaptive or "adaptive" not in rule:  # without a value it has a problem of its own
        bounds = [kind for kind in QuotaKind if kind in rule]
        shared = rule.get("scope") == "shared"
        problems += find_bound_problems(keys, bounds, shared=shared, adaptive=adaptive)
    for problem in problems:
        at = (*loc, problem.key) if problem.key else loc
        yield document.problem(at, problem.message, problem.fix)


def _same_rules(document: YamlDocument, rules: list[_Item]) -> Iterator[ConfigProblem]:
    named = (
        (loc, tuple((key, str(rule[key])) for key in RULE_KEYS if key in rule))
        for loc, rule in rules
    )
    for loc, keys, earlier in _repeated((loc, keys) for loc, keys in named if keys):
        words = ", ".join(f"{key}: {value}" for key, value in keys)
        message = f"is for the same clients ({words}) as {_at(document, earlier)}"
        yield document.problem(loc, message, "put the quotas of both into one rule")


def _same_clients(document: YamlDocument, queries: list[_Item]) -> Iterator[ConfigProblem]:
    by_loc = dict(queries)
    ids = ((loc, query.get("client-id", query.get("name"))) for loc, query in queries)
    texts = ((loc, text) for loc, text in ids if isinstance(text, str) and text)
    for loc, client_id, earlier in _repeated(texts):
        # Where both are left out the names are the same, and that has been said.
        if "client-id" in by_loc[loc] or "client-id" in by_loc[earlier]:
            message = f"{shown(client_id)} is also the client-id of {_at(document, earlier)}"
            fix = "give each query a client-id of its own; it is the name where none is written"
            yield document.problem((*loc, "client-id"), message, fix)


def _too_many(
    document: YamlDocument, section: str, lists: list[object], what: str
) -> Iterator[ConfigProblem]:
    """Yield that a section names more than there are metrics for, if it does."""
    limits = document.data.get("limits")
    most = limits.get("max_client_entities") if isinstance(limits, dict) else None
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        most = LimitsSection.model_fields["max_client_entities"].default
    count = sum(len(listed) for listed in lists if isinstance(listed, list))
    if count > most:
        message = f"{what.format(count)}, more than limits.max_client_entities, {most}"
        fix = "remove some, or raise limits.max_client_entities"
        yield document.problem((section,), message, fix)


def _unknown_listeners(
    document: YamlDocument, rules: list[_Item], listeners: list[_Item]
) -> Iterator[ConfigProblem]:
    names = [name for _, item in listeners if isinstance(name := item.get("name"), str)]
    for loc, rule in rules:
        wanted = rule.get("listener")
        if names and isinstance(wanted, str) and wanted and wanted not in names:
            nearest = difflib.get_close_matches(wanted, names, n=1) or names
            message = f"no listener has the name {shown(wanted)}"
            yield document.problem((*loc, "listener"), message, f"write {' or '.join(nearest)}")


def _tier_problems(document: YamlDocument, listeners: list[_Item]) -> Iterator[ConfigProblem]:
    """Yield that a tier keeps its state where others cannot read it, and names without a tier."""
    if document.data.get("tier") is not None:
        state = document.data.get("state")
        kind = state.get("kind") if isinstance(state, dict) else None
        default = StateSection.model_fields["kind"].default
        if kind in (None, *STATE_KINDS) and kind != "kafka":
            message = (
                f"needs state.kind: kafka, which all its machines can read, not {kind or default}"
            )
            yield document.problem(("tier",), message, "write state: {kind: kafka, topic: NAME}")
        given = document.data.get("admin")
        admin: Mapping[str, object] = given if isinstance(given, dict) else {}
        bind = _parsed(endpoints.parse_bind, admin.get("bind"))
        is_guarded = bool(admin.get("tokens")) or (bind is not None and not bind.is_loopback)
        if is_guarded and admin.get("token_file") is None:
            message = "needs admin.token_file: with its token the machines ask each other"
            yield document.problem(("tier",), message, "write one token for all into that file")
        return
    with suppress(BadValueError):
        if (workers := count_workers(parse_workers(document.data.get("workers", 1)))) > 1:
            message = f"{workers} workers are members of a tier, and there is no tier"
            fix = "add tier: {name: NAME} and state: {kind: kafka, topic: NAME}, or 1 worker"
            yield document.problem(("workers",), message, fix)
    for loc, listener in listeners:
        tls = listener.get("tls")
        values = (
            ((*loc, "advertised_host"), listener.get("advertised_host")),
            ((*loc, "tls", "sni"), tls.get("sni") if isinstance(tls, dict) else None),
        )
        for at, value in values:
            if isinstance(value, str) and endpoints.MACHINE_PLACEHOLDER in value:
                message = f"{shown(value)} names a machine of a tier, and there is no tier"
                yield document.problem(at, message, "add tier: {name: NAME}, or write the name")


def _useless_state_keys(document: YamlDocument) -> Iterator[ConfigProblem]:
    state = document.data.get("state")
    if not isinstance(state, dict):
        return
    kind = state.get("kind", StateSection.model_fields["kind"].default)
    for key, its_kind in STATE_KEYS.items():
        if key in state and kind != its_kind and isinstance(kind, str) and kind in STATE_KINDS:
            message = f"is of no use to kind {kind}, which {STATE_KINDS[kind]}"
            yield document.problem(("state", key), message, f"remove it, or write kind: {its_kind}")
