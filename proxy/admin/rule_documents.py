"""Describes rules and pauses, where each comes from and when it ends; reads what sets them."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime

from proxy.admin.document_models import DocumentModel, RowContext, between_s, iso, picked
from proxy.admin.replies import ApiError, parse_field, quote_json, read_object
from proxy.quota.entities import QuotaKind
from proxy.quota.rule_registry import RuleEntry, RuleRegistry, make_override
from proxy.quota.rules import QuotaPause, Rule, Share
from proxy.quota.validation import (
    BUDGET_KEY,
    CLIENT_KEYS,
    check_rule_keys,
    find_bound_conflicts,
    parse_scope,
)
from proxy.quota.values import MAX_DURATION_S, BadValueError, parse_duration
from proxy.state import Document

MOST_SCHEDULED = 20
"""So many rules and budgets with a schedule are in each answer; `/v1/quotas` has all."""


def _by_kind(figures: Mapping[QuotaKind, float]) -> Document:
    return {str(kind): figure for kind, figure in figures.items()}


RULE = DocumentModel[RuleEntry](
    """
    selector, keys: what a path names it by, and the same by keys
    scope: `each` or `shared`
    enforce: `false`: [only observed](quotas.md#observe-before-you-enforce)
    expected: what it says of an [alert](operations.md)
    adaptive: `null`, or its settings: records per second, milliseconds
    bounds: all its quotas
    share: `null`, or what it has of a budget: `budget`, `weight`, `guaranteed`
    ceilings: what a client of it can have at most
    title, place: what the log calls it, and where it is in the file
    source, by, at: `file`, `override` or `kafka`; who set an override, and when
    until, left_s: when it ends by itself, and in how many seconds; both `null`: not at all
    when: `null`, or its [schedule](quotas.md#schedules): `days`, `from`, `to`, `timezone`
    schedule: `null` without `when`, or in words: `in force until 2026-11-27 18:00+01:00`, or when
        it `begins`
    in_force: `false` where a rule of a stronger source has the same keys, and outside of its
        schedule
    """,
    {
        "adaptive": lambda entry, _: entry.rule.adaptive and asdict(entry.rule.adaptive),
        "bounds": lambda entry, _: _by_kind(entry.rule.bounds),
        "share": lambda entry, _: entry.rule.share and _share(entry.rule.share),
        "ceilings": lambda entry, _: _by_kind(entry.rule.ceilings),
        "at": lambda entry, _: iso(entry.at_s),
        "until": lambda entry, _: iso(entry.until_s),
        "schedule": lambda entry, now: now.schedules.get(entry.rule.title),
        "left_s": lambda entry, now: between_s(now.now_s, entry.until_s),
        "when": lambda entry, _: entry.rule.when and entry.rule.when.document(),
        **{
            name: f"rule.{name}"
            for name in ("selector", "keys", "scope", "enforce", "expected", "title", "place")
        },
    },
)

BUDGET_RULE = DocumentModel[RuleEntry](
    """
    name, budget: of the budget, and of the one that it is in
    selector, enforce, title, place, bounds, source, by, at, until, left_s: as of a rule; with the
        rates of an override if there is one
    when, schedule, in_force: as of a rule
    """,
    {
        "name": lambda entry, _: entry.rule.keys[BUDGET_KEY],
        "budget": lambda entry, _: entry.rule.share and entry.rule.share.budget.name,
    },
    like=RULE,
)

PAUSE = DocumentModel[QuotaPause](
    """
    selector, keys: whose quotas are paused
    until, left_s: when it ends by itself, and in how many seconds
    by, at: who paused them, and when
    """,
    {
        "selector": "name",
        "keys": lambda pause, _: dict(pause.keys),
        "until": lambda pause, _: iso(pause.until_s),
        "left_s": lambda pause, now: between_s(now.now_s, pause.until_s),
        "at": lambda pause, _: iso(pause.at_s),
    },
)


def _share(share: Share) -> Document:
    return {"budget": share.budget.name, **picked(share, "weight", "guaranteed")}


def rule_reference(rule: Rule, now: RowContext) -> Document:
    """Return what names a rule; a sensor may be under one that has gone, which has no source."""
    name = rule.selector
    entry = now.in_force.get(name)
    origin: Document = dict.fromkeys(("source", "by", "at", "until", "schedule"))
    if entry is not None:
        about = {"schedule": now.schedules.get(entry.rule.title), "at": iso(entry.at_s)}
        origin = {"source": str(entry.source), "by": entry.by, **about, "until": iso(entry.until_s)}
    return {"selector": name, **picked(rule, "title", "place"), **origin}


def audited_rule_document(entry: RuleEntry) -> Document:
    """Return what a rule sets, in the words of the configuration, as the audit shows it.

    `enforce` and `until` are there where they are not what most rules have.
    """
    rule = entry.rule
    return {
        **{str(kind): kind.unit.format(bound) for kind, bound in rule.bounds.items()},
        "scope": rule.scope,
        "source": str(entry.source),
        "by": entry.by,
        **({} if rule.enforce else {"enforce": False}),
        **({} if entry.until_s is None else {"until": iso(entry.until_s)}),
    }


def throttling_document(rules: RuleRegistry, now_s: float) -> Document:
    """Return whether quotas are enforced, for whom they are paused, and schedules, for JSON."""
    paused = [PAUSE.document(pause, RowContext(now_s)) for pause in rules.pauses()]
    told = rules.composed.of_file.told
    scheduled = [
        {"selector": each.rule.selector, "schedule": told[each.rule.title]}
        for each in ((*rules.composed.budgets, *rules.composed.entries) if told else ())
        if each.rule.title in told
    ]
    shown = scheduled[:MOST_SCHEDULED]
    enforced = rules.composed.settings.enforce
    return {"enforced": enforced, "paused": paused, "scheduled": shown}


MAX_BY_CHARS = 200

_KEYS = (*map(str, QuotaKind), "scope", "enforce", "until", "by")
_EXAMPLE = '{"consumer_byte_rate": "10MiB", "by": "anna"}'
_PAUSE_KEYS = ("off", "on", "by", *CLIENT_KEYS)
_PAUSE_EXAMPLE = '{"off": "30m"} or {"on": true}'
_END_FIX = 'write how long, such as "30m", or a time with its zone, such as "2026-11-22T18:00:00Z"'


def parse_override(keys: Mapping[str, str], body: bytes, now_s: float) -> RuleEntry:
    """Read what is to be the rule of these keys: `{"consumer_byte_rate": "10MiB", "by": "anna"}`.

    Raises ApiError with status 400 for anything that is not such a body, ValueError where it makes
    no rule.
    """
    document = read_object(body, _KEYS, _EXAMPLE)
    given = [kind for kind in QuotaKind if kind in document]
    bounds = {kind: parse_field(kind, kind.unit.parse, document[kind]) for kind in given}
    if BUDGET_KEY in keys and "scope" in document:
        raise ApiError(400, "scope is nothing that a budget has", "remove it")
    scope = parse_field("scope", parse_scope, document.get("scope", "each"))
    for problem in find_bound_conflicts(keys, bounds):
        raise ApiError(400, f"{problem.key or 'the body'} {problem.message}", problem.fix)
    enforce = document.get("enforce")
    if enforce is not None and not isinstance(enforce, bool):
        raise ApiError(
            400, f"enforce: {quote_json(enforce)} is not known here", "write true or false"
        )
    until = document.get("until")
    until_s = None if until is None else _end("until", until, now_s)
    by = _by(document.get("by"))
    return make_override(keys, bounds, scope, by, now_s, enforce=enforce, until_s=until_s)


def parse_throttling(
    body: bytes, now_s: float
) -> tuple[Mapping[str, str], float | None, str | None]:
    """Read a body such as `{"off": "30m", "client-id": "etl", "by": "anna"}` or `{"on": true}`.

    Returns the keys of the clients, as those of a rule, none for all; when the pause ends by
    itself, None where the quotas are enforced again; and who says so. Raises ApiError with status
    400 for anything that is not such a body.
    """
    document = read_object(body, _PAUSE_KEYS, _PAUSE_EXAMPLE)
    if ("off" in document) == ("on" in document):
        raise ApiError(400, "the body has not exactly one of off and on", f"send {_PAUSE_EXAMPLE}")
    if document.get("on", True) is not True:
        raise ApiError(
            400, f"on: {quote_json(document['on'])} is not true", f"send {_PAUSE_EXAMPLE}"
        )
    keys: dict[str, object] = {key: document[key] for key in CLIENT_KEYS if key in document}
    try:
        if keys:
            check_rule_keys(keys)
    except BadValueError as error:
        raise ApiError(400, error.message, error.fix) from None
    until_s = _end("off", document["off"], now_s) if "off" in document else None
    texts = {key: str(value) for key, value in keys.items()}
    return texts, until_s, _by(document.get("by"))


def _end(key: str, value: object, now_s: float) -> float:
    """Read how long something lasts, or until when; return the time of its end."""
    if isinstance(value, str) and "-" in value:  # which no duration has
        try:
            end = datetime.fromisoformat(value)
        except ValueError:
            raise ApiError(400, f"{key}: {quote_json(value)} is not a time", _END_FIX) from None
        if end.tzinfo is None:
            raise ApiError(400, f"{key}: {quote_json(value)} has no zone", _END_FIX)
        seconds = end.timestamp() - now_s
        if seconds <= 0:
            raise ApiError(400, f"{key}: {quote_json(value)} is over", _END_FIX)
        if seconds > MAX_DURATION_S:
            raise ApiError(400, f"{key}: {quote_json(value)} is more than a year away", _END_FIX)
        return end.timestamp()
    return now_s + parse_field(key, parse_duration, value, _END_FIX)


def _by(value: object) -> str | None:
    # What is not printable could not be stored (lone surrogates), or would spoil a log or terminal.
    is_name = isinstance(value, str) and len(value) <= MAX_BY_CHARS and value.isprintable()
    if value is None or is_name:
        return str(value) if value else None
    fix = f"write up to {MAX_BY_CHARS} printable characters"
    raise ApiError(400, f"by: {quote_json(value)} is not a name", fix)
