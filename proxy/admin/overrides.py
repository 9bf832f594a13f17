"""Reads the body of a request that sets a quota, or pauses quotas, at run time."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TypeVar

from proxy.admin.replies import bad_request, read_object, shown_json
from proxy.quota.entities import QuotaKind
from proxy.quota.rule_registry import RuleEntry, make_override
from proxy.quota.validation import (
    BUDGET_KEY,
    CLIENT_KEYS,
    check_keys,
    find_bound_problems,
    parse_scope,
)
from proxy.quota.values import MAX_DURATION_S, BadValueError, parse_duration

MAX_BY_CHARS = 200

Value = TypeVar("Value")

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
    bounds = {kind: _parsed(kind, kind.unit.parse, document[kind]) for kind in given}
    if BUDGET_KEY in keys and "scope" in document:
        raise bad_request("scope is nothing that a budget has", "remove it")
    scope = _parsed("scope", parse_scope, document.get("scope", "each"))
    for problem in find_bound_problems(keys, bounds):
        raise bad_request(f"{problem.key or 'the body'} {problem.message}", problem.fix)
    enforce = document.get("enforce")
    if enforce is not None and not isinstance(enforce, bool):
        raise bad_request(
            f"enforce: {shown_json(enforce)} is not known here", "write true or false"
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
        raise bad_request("the body has not exactly one of off and on", f"send {_PAUSE_EXAMPLE}")
    if document.get("on", True) is not True:
        raise bad_request(f"on: {shown_json(document['on'])} is not true", f"send {_PAUSE_EXAMPLE}")
    keys: dict[str, object] = {key: document[key] for key in CLIENT_KEYS if key in document}
    try:
        if keys:
            check_keys(keys)
    except BadValueError as error:
        raise bad_request(error.message, error.fix) from None
    until_s = _end("off", document["off"], now_s) if "off" in document else None
    texts = {key: str(value) for key, value in keys.items()}
    return texts, until_s, _by(document.get("by"))


def _end(key: str, value: object, now_s: float) -> float:
    """Read how long something lasts, or until when; return the time of its end."""
    if isinstance(value, str) and "-" in value:  # which no duration has
        try:
            end = datetime.fromisoformat(value)
        except ValueError:
            raise bad_request(f"{key}: {shown_json(value)} is not a time", _END_FIX) from None
        if end.tzinfo is None:
            raise bad_request(f"{key}: {shown_json(value)} has no zone", _END_FIX)
        seconds = end.timestamp() - now_s
        if seconds <= 0:
            raise bad_request(f"{key}: {shown_json(value)} is over", _END_FIX)
        if seconds > MAX_DURATION_S:
            raise bad_request(f"{key}: {shown_json(value)} is more than a year away", _END_FIX)
        return end.timestamp()
    try:
        return now_s + parse_duration(value)
    except BadValueError as error:
        raise bad_request(f"{key}: {error.message}", _END_FIX) from None


def _parsed(key: str, parse: Callable[[object], Value], value: object) -> Value:
    try:
        return parse(value)
    except BadValueError as error:
        raise bad_request(f"{key}: {error.message}", error.fix) from None


def _by(value: object) -> str | None:
    # What is not printable could not be stored (lone surrogates), or would spoil a log or terminal.
    is_name = isinstance(value, str) and len(value) <= MAX_BY_CHARS and value.isprintable()
    if value is None or is_name:
        return str(value) if value else None
    fix = f"write up to {MAX_BY_CHARS} printable characters"
    raise bad_request(f"by: {shown_json(value)} is not a name", fix)
