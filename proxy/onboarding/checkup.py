"""Decides what is wrong between a query, its rule, its listener and the proxy; pure.

What was seen comes in: the configuration, the answers of the admin port, and how far connections to
the listeners got. The findings come out in the order in which their causes are to be mended.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from proxy.cluster.upstream import UNKNOWN_TOPIC, error_name
from proxy.config import Config
from proxy.config.check_report import rules_for_client_id
from proxy.config.document import quote_for_yaml
from proxy.progress.query import QuerySettings
from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import Rule, RuleTable
from proxy.state import Document

NAMES_SHOWN = 5
LIKENESS = 0.8
"""From 0 to 1, as difflib has it: so much alike are names of which one is a slip."""

SERVING = frozenset({"running", "idle"})
READING = QuotaKind.CONSUMER_BYTE_RATE


class CheckVerdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    NOTE = "note"
    """Not wrong by itself, and worth to be known."""
    WRONG = "WRONG"
    UNKNOWN = "?"
    """Could not be checked."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found; `fix` says how to mend it, where something is wrong."""

    verdict: CheckVerdict
    check: str
    text: str
    fix: str = ""


_ok, _note, _wrong, _unknown = (partial(Finding, verdict) for verdict in CheckVerdict)


@dataclass(frozen=True, slots=True)
class AdminSnapshot:
    """What the admin port of the running proxy says."""

    url: str
    failure: str | None = None
    """Why it said nothing; then all else is empty."""
    refused_token: str | None = None
    """Why a report with the listener's token would be refused; None: it would not."""
    token_file: str | None = None
    """Where that token is; None: none is needed."""
    status: Document | None = None
    file_rules: frozenset[str] = frozenset()
    """Selectors of the rules that it has from its file."""
    connections: Sequence[Document] = ()
    queries: Sequence[Document] = ()
    """Progress of all."""
    refused_reports: Mapping[str, int] | None = None
    """Of all queries, by the reason; those that were only repeated are left out."""


@dataclass(frozen=True, slots=True)
class ListenerCheckResult:
    """How far a connection to a listener got, from where `doctor` runs."""

    name: str
    address: str
    failure: str | None = None
    unasked: str | None = None
    """Why the cluster was not asked through it."""
    brokers: Mapping[str, str | None] | None = None
    """Why each of the brokers' addresses does not answer, None if it does."""
    topics: Mapping[str, int] | None = None
    """The error code of each topic that was asked for."""


def query_or_unlisted(config: Config, name: str) -> QuerySettings:
    """Return the query with this name or else client id; for none, one that is not followed."""
    named = [each for each in config.queries if each.name == name]
    named += [each for each in config.queries if each.client_id == name]
    return next(iter(named), QuerySettings(name=name, client_id=name))


def check_query(
    config: Config,
    table: RuleTable,
    query: QuerySettings,
    admin: AdminSnapshot,
    listeners: Sequence[ListenerCheckResult],
) -> Iterator[Finding]:
    """Yield what is wrong or well, causes first."""
    yield from _rule(config, table, query)
    yield _followed(config, table, query)
    yield from _admin(table, admin)
    yield from _listeners(listeners)
    yield from _topics(listeners)
    if admin.failure is not None:
        for check in ("client", "reports", "trigger"):
            yield _unknown(check, "not checked: only the running proxy knows")
        return
    progress = progress_of(admin, query)
    yield _client(query, admin, progress)
    yield from _reports(query, admin, progress)
    if progress is not None and progress["last_heard"] is not None:
        yield from _advice(progress)
        yield from _trouble(progress)


def progress_of(admin: AdminSnapshot, query: QuerySettings) -> Document | None:
    """Return the progress of the query, if the proxy knows of it."""
    known = [each for each in admin.queries if each["name"] == query.name]
    known += [each for each in admin.queries if each["client_id"] == query.client_id]
    return next(iter(known), None)


def _names(rule: Rule) -> bool:
    """Return whether a rule is for this client and not for all that no other rule names."""
    return rule.client_id not in (None, DEFAULT) or rule.client_id_prefix is not None


def _rule(config: Config, table: RuleTable, query: QuerySettings) -> Iterator[Finding]:
    client_id = query.client_id
    rules = rules_for_client_id(config, table, READING, client_id)
    near = _near(client_id, [rule.client_id for rule in table.rules if rule.client_id != DEFAULT])
    key = f"client-id: {quote_for_yaml(client_id)}"
    add = f"add {{{key}, consumer_byte_rate: 10MiB}} to quotas.rules"
    if near is not None and not any(map(_names, rules)):
        what = f"no rule names client id {client_id!r}, and one names {near!r}"
        fix = f"let the rule, kafka.client.id and the listener say the same name, or {add}"
        yield _wrong("rule", what, fix)
    elif not rules and config.quotas.source == "kafka":
        what = f"no rule of the file bounds client id {client_id!r}; the cluster's quotas may"
        yield _note("rule", what)
    elif not rules:
        yield _wrong("rule", f"no rule bounds client id {client_id!r}", add)
    else:
        for rule in rules:
            bound = READING.unit.format(rule.ceilings[READING])
            text = f"{rule.title} gives client id {client_id!r} {bound}"
            text += ", and fits its batches to its trigger" if rule.adaptive else ""
            text += "" if _names(rule) else ", as all that no other rule names"
            yield _ok("rule", text)
            if not (rule.enforce and config.throttle.enforce):
                yield _note("rule", f"{rule.title} is not enforced: nobody is held")


def _followed(config: Config, table: RuleTable, query: QuerySettings) -> Finding:
    if query in config.queries:
        to = f"committed to {query.commit_group}" if query.commit_group else "not committed"
        return _ok("queries", f"queries names it; what it completes is {to}")
    name, group = quote_for_yaml(query.name), quote_for_yaml(f"{query.name}-progress")
    fix = f"add {{name: {name}, commit_group: {group}}} to queries"
    if any(rule.adaptive for rule in rules_for_client_id(config, table, READING, query.client_id)):
        text = "only its adaptive rule has it followed, so what it completes is not committed"
        return _note("queries", text, fix)
    text = f"queries does not name {query.name!r}: its lag is not followed, nothing is committed"
    return _wrong("queries", text, fix)


def _admin(table: RuleTable, admin: AdminSnapshot) -> Iterator[Finding]:
    if admin.failure is not None:
        fix = "start the proxy with this configuration, or give the address of admin.bind as --url"
        yield _wrong("admin port", admin.failure, fix)
        return
    status = admin.status or {}
    yield _ok("admin port", f"{admin.url} answers, version {status['version']}")
    if not status["ready"]:
        what = f"clients can't be served: {status['not_ready_reason']}"
        fix = "see /readyz, the proxy's log, and whether cluster.bootstrap_servers answer"
        yield _wrong("proxy", what, fix)
    elif status["warning"]:
        yield _note("proxy", status["warning"])
    latest = next(iter(status["config_loads"]), None)
    if latest is not None and latest["result"] != "ok":
        what = f"its configuration was not loaded again: {latest['message']}"
        yield _wrong("proxy", what, "mend the file; it is loaded again by itself")
    elif admin.file_rules != {rule.selector for rule in table.rules}:
        what = f"the proxy at {admin.url} has other rules than this file"
        fix = "give the file that it runs with, or the address of the right proxy as --url"
        yield _wrong("proxy", what, fix)
    if status["throttling"]["paused"]:
        yield _note("proxy", "quotas are paused: see quota-proxy resume")
    if admin.refused_token is not None:
        fix = "give QuotaListener the token of admin.tokens with the right report"
        yield _wrong("token", admin.refused_token, fix)
    elif admin.token_file is not None:
        yield _ok("token", f"a report with the token in {admin.token_file} is taken")
    else:
        yield _ok("token", "reports need none")


def _listeners(listeners: Iterable[ListenerCheckResult]) -> Iterator[Finding]:
    for each in listeners:
        check = f"listener {each.name}"
        if each.failure is not None:
            what = f"clients are told {each.address}, and from here {each.failure}"
            fix = "let advertised_host name this proxy for clients, and see that it runs"
            yield _wrong(check, what, fix)
            continue
        silent = {broker: why for broker, why in (each.brokers or {}).items() if why is not None}
        if silent:
            what = "; ".join(f"{broker}: {why}" for broker, why in silent.items())
            fix = "let clients reach all of broker_ports at advertised_host, in firewalls too"
            what = f"brokers do not answer at the addresses that clients are told: {what}"
            yield _wrong(check, what, fix)
        elif each.unasked is not None:
            what = f"{each.address} answers; its brokers were not asked for: {each.unasked}"
            yield _ok(check, what)
        else:
            brokers = ", ".join(each.brokers or ())
            yield _ok(check, f"{each.address} answers, and so do {brokers}")


def _topics(listeners: Iterable[ListenerCheckResult]) -> Iterator[Finding]:
    codes: dict[str, int] = {}
    for each in listeners:
        codes |= each.topics or {}
    if not codes:
        what = "not checked: no topic is known of it, and none was given as --topic"
        yield _unknown("topic", what)
    for topic, code in codes.items():
        if code == UNKNOWN_TOPIC:
            fix = "create it, or correct the option subscribe of the query"
            yield _wrong("topic", f"the cluster has no topic {topic!r}", fix)
        elif code:
            what = f"the cluster says {error_name(code)} of topic {topic!r}"
            yield _wrong("topic", what, "look at the topic, and at its rights")
        else:
            yield _ok("topic", f"the cluster has {topic!r}")


def _client(query: QuerySettings, admin: AdminSnapshot, progress: Document | None) -> Finding:
    client_id = query.client_id
    open_now = sum(each["client_id"] == client_id for each in admin.connections)
    if open_now:
        return _ok("client", f"{open_now} connections with client id {client_id!r} are open")
    partitions = () if progress is None else progress["partitions"]
    if any(each["delivered_to"] for each in partitions):
        text = f"client id {client_id!r} has read through the proxy, and is not connected now"
        return _note("client", text)
    fix = "give the source the options client_options() makes: kafka.bootstrap.servers of the "
    fix += f"proxy and kafka.client.id {client_id!r}"
    text = f"no client with client id {client_id!r} is connected to the proxy"
    names = [each["client_id"] for each in admin.connections if each["client_id"]]
    by_group = next((name for name in names if name.startswith(f"consumer-{client_id}-")), None)
    if by_group is not None:
        text += f", but {by_group!r} is: with groupIdPrefix nobody can tell whose look-ups they are"
        fix = "let client_options() set kafka.client.id, without by_group; then it is "
        fix += repr(client_id)
    elif near := _near(client_id, names):
        text += f", but {near!r} is"
        fix = f"let kafka.client.id, the rule and queries say the same: {client_id!r}"
    return _wrong("client", text, fix)


def _reports(
    query: QuerySettings, admin: AdminSnapshot, progress: Document | None
) -> Iterator[Finding]:
    add = f"call spark.streams.addListener(QuotaListener({admin.url!r}, token=...)) in the driver "
    add += f"before the query starts, and queryName({query.name!r}) on it"
    if progress is None or progress["last_heard"] is None:
        text = f"no report of the query {query.name!r} has come in since the proxy started"
        heard = [each["name"] for each in admin.queries if each["last_heard"] is not None]
        if heard:
            text += f"; there are of {', '.join(map(repr, heard[:NAMES_SHOWN]))}"
        if admin.refused_reports:
            text += f"; refused were {_counted(admin.refused_reports)}"
            add += "; the driver's logger quota_listener says why reports are refused"
        yield _wrong("reports", text, add)
        return
    reports, state = progress["reports"], progress["state"]
    refused = {why: count for why, count in reports["refused"].items() if why != "repeated"}
    if refused:
        fix = "see the driver's logger quota_listener; one client id belongs to one query"
        yield _wrong("reports", f"some of its reports were refused: {_counted(refused)}", fix)
    if state == "failed":
        text = f"the query has failed: {progress['error']}"
        yield _wrong("reports", text, "mend that in the job, and start it again")
    elif state == "silent":
        text = "the listener has said nothing of the query for a minute"
        fix = f"see that the driver runs, and that it reaches {admin.url}"
        yield _wrong("reports", text, fix)
    elif state in SERVING:
        batch = progress["batch"]
        done = f"last batch {batch['id']}" if batch is not None else "no batch has ended yet"
        yield _ok("reports", f"its listener reports: {state}, {done}")
    else:
        yield _note("reports", "its last run has ended")


def _advice(progress: Document) -> Iterator[Finding]:
    """Yield what the proxy itself has found out about names and triggers."""
    for each in progress["advice"]:
        what, _, mend = each["text"].partition(": ")
        fix = mend or "see what the proxy says to mend in docs/spark.md"
        about = each["kind"] if each["kind"] in ("names", "reports") else "trigger"
        yield _wrong(about, what, fix)
    trigger = progress["trigger"]
    if trigger is None:
        yield _unknown("trigger", "its trigger is not known")
    elif not progress["advice"]:
        every = f" every {trigger['interval_s']:g} s" if trigger["interval_s"] is not None else ""
        yield _ok("trigger", f"{trigger['kind']}{every} goes with its rule")


def _trouble(progress: Document) -> Iterator[Finding]:
    totals, commit = progress["totals"], progress["commit"]
    if totals["stuck_partitions"]:
        text = f"{totals['stuck_partitions']} partitions with more to read do not move"
        fix = f"look at GET /v1/progress?query={progress['name']}, and at the driver's log"
        yield _wrong("lag", text, fix)
    elif totals["lag_records"] is not None:
        yield _ok("lag", f"{totals['lag_records']:,} records are not completed")
    if commit is not None and commit["error"] is not None:
        text = f"offsets are not committed to {commit['group']}: {commit['error']}"
        fix = "use the group for nothing else, and see what the cluster lets the proxy do"
        yield _wrong("commits", text, fix)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} ({why})" for why, count in counts.items())


def _near(name: str, others: Iterable[str | None]) -> str | None:
    """Return another name that was perhaps meant: spelt alike, whatever its blanks and capitals."""
    known = {each.strip().casefold(): each for each in others if each not in (None, name)}
    alike = difflib.get_close_matches(name.strip().casefold(), known, n=1, cutoff=LIKENESS)
    return known[alike[0]] if alike else None
