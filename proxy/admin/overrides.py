"""Reads the body of a request that sets a quota at run time."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from proxy.admin.replies import ApiError
from proxy.quota.entities import QuotaKind

ParseSize = Callable[[object], int]
"""Reads a size such as `10MiB` or 65536 into bytes. Raises ValueError for anything else, which
may have an attribute `fix`."""

MAX_BY_CHARS = 200

_SCOPES: tuple[Literal["each"], Literal["shared"]] = ("each", "shared")
_KEYS = (*map(str, QuotaKind), "scope", "by")
_EXAMPLE = '{"consumer_byte_rate": "10MiB", "by": "anna"}'


@dataclass(frozen=True, slots=True)
class Override:
    """A quota to put in force."""

    bounds: Mapping[QuotaKind, float]
    """Bytes per second, or percent; at least one."""
    scope: Literal["each", "shared"]
    by: str | None
    """Who sets it."""


def parse_override(body: bytes, parse_size: ParseSize) -> Override:
    """Read a body such as `{"consumer_byte_rate": "10MiB", "scope": "shared", "by": "anna"}`.

    Raises ApiError with status 400 for anything that is not such a body.
    """
    document = _json_object(body)
    unknown = sorted(set(document) - set(_KEYS))
    if unknown:
        raise _bad(f"unknown key {_shown(unknown[0])}", f"use {', '.join(_KEYS)}")
    bounds = {
        kind: _bound(kind, document[kind], parse_size) for kind in QuotaKind if kind in document
    }
    if not bounds:
        raise _bad("the body sets no quota", f"set one of {', '.join(QuotaKind)}")
    return Override(bounds, _scope(document.get("scope", "each")), _by(document.get("by")))


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


def _bound(kind: QuotaKind, value: object, parse_size: ParseSize) -> float:
    if kind is QuotaKind.REQUEST_PERCENTAGE:
        return _percentage(value)
    try:
        return float(parse_size(value))
    except ValueError as error:
        fix = getattr(error, "fix", "write bytes per second, such as 10MiB or 65536")
        raise _bad(f"{kind}: {error}", fix) from None


def _percentage(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            percent = float(value)
        except OverflowError:
            percent = math.inf
        if math.isfinite(percent) and percent > 0:
            return percent
    raise _bad(
        f"{QuotaKind.REQUEST_PERCENTAGE}: {_shown(value)} is not a number above 0",
        "write a number such as 50; 100 is one connection that always waits for an answer",
    )


def _scope(value: object) -> Literal["each", "shared"]:
    for scope in _SCOPES:
        if value == scope:
            return scope
    raise _bad(f"scope: {_shown(value)} is not a scope", f"use {' or '.join(_SCOPES)}")


def _by(value: object) -> str | None:
    # What is not printable could not be stored (lone surrogates), or would spoil a log or terminal.
    if value is None or (
        isinstance(value, str) and len(value) <= MAX_BY_CHARS and value.isprintable()
    ):
        return value or None
    raise _bad(
        f"by: {_shown(value)} is not a name", f"write up to {MAX_BY_CHARS} printable characters"
    )


def _shown(value: object) -> str:
    """Quote a value in a message, cut where it is long."""
    most = 60
    text = json.dumps(value) if not isinstance(value, dict | list) else "a collection"
    return text if len(text) <= most else f"{text[:most]}..."


def _bad(what: str, fix: str) -> ApiError:
    return ApiError(400, what, fix)
