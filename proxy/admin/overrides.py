"""Reads the body of a request that sets a quota at run time."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from proxy.admin.replies import ApiError
from proxy.quota.entities import QuotaKind
from proxy.quota.validation import find_bound_problems, parse_scope
from proxy.quota.values import BadValueError

MAX_BY_CHARS = 200
MAX_SHOWN_CHARS = 60

Value = TypeVar("Value")

_KEYS = (*map(str, QuotaKind), "scope", "by")
_EXAMPLE = '{"consumer_byte_rate": "10MiB", "by": "anna"}'


@dataclass(frozen=True, slots=True)
class Override:
    """A quota to put in force, and who sets it."""

    bounds: Mapping[QuotaKind, float]
    """Bytes per second, or percent; at least one."""
    scope: str
    by: str | None


def parse_override(body: bytes) -> Override:
    """Read a body such as `{"consumer_byte_rate": "10MiB", "scope": "shared", "by": "anna"}`.

    Raises ApiError with status 400 for anything that is not such a body.
    """
    document = _json_object(body)
    unknown = sorted(set(document) - set(_KEYS))
    if unknown:
        raise _bad(f"unknown key {_shown(unknown[0])}", f"use {', '.join(_KEYS)}")
    given = [kind for kind in QuotaKind if kind in document]
    bounds = {kind: _parsed(kind, kind.unit.parse, document[kind]) for kind in given}
    scope = _parsed("scope", parse_scope, document.get("scope", "each"))
    for problem in find_bound_problems((), bounds):
        raise _bad(f"the body {problem.message}", problem.fix)
    return Override(bounds, scope, _by(document.get("by")))


def _json_object(body: bytes) -> dict[str, object]:
    try:
        document = json.loads(body)
    except RecursionError:
        raise _bad("the body is nested too deeply", f"send {_EXAMPLE}") from None
    except ValueError as error:  # not UTF-8 is one as well
        raise _bad(f"the body is not JSON: {error}", f"send {_EXAMPLE}") from None
    if not isinstance(document, dict):
        raise _bad("the body is not a JSON object", f"send {_EXAMPLE}")
    return document


def _parsed(key: str, parse: Callable[[object], Value], value: object) -> Value:
    try:
        return parse(value)
    except BadValueError as error:
        raise _bad(f"{key}: {error.message}", error.fix) from None


def _by(value: object) -> str | None:
    # What is not printable could not be stored (lone surrogates), or would spoil a log or terminal.
    is_name = isinstance(value, str) and len(value) <= MAX_BY_CHARS and value.isprintable()
    if value is None or is_name:
        return str(value) if value else None
    fix = f"write up to {MAX_BY_CHARS} printable characters"
    raise _bad(f"by: {_shown(value)} is not a name", fix)


def _shown(value: object) -> str:
    """Quote a value in a message, cut where it is long."""
    text = json.dumps(value) if not isinstance(value, dict | list) else "a collection"
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _bad(what: str, fix: str) -> ApiError:
    return ApiError(400, what, fix)
