"""What makes a quota rule: the one set of checks for the file, for overrides, and for `Rule`.

And the selector, which names the clients of a rule in one line, for URLs and for keys of the state.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final
from urllib.parse import quote, unquote

from .entities import DEFAULT, QuotaKind
from .values import BadValueError, parse_text, shown

RULE_KEYS: Final = ("user", "client-id", "client-id-prefix", "listener")
"""What a rule can ask of a client."""

KEYS = (*RULE_KEYS[-1:], *RULE_KEYS[:-1])
"""The keys of a rule in the order of a selector."""

BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def find_key_problems(keys: Collection[str]) -> Iterator[BadValueError]:
    """Yield what is wrong with the keys that a rule names."""
    if not keys:
        every = f"client-id: {DEFAULT} fits every client"
        fix = f"add one of {', '.join(RULE_KEYS)}; {every}"
        yield BadValueError("fits no client: it has no key", fix)
    if "client-id" in keys and "client-id-prefix" in keys:
        yield BadValueError("has both client-id and client-id-prefix", "keep one of the two")


def find_bound_problems(
    keys: Collection[str],
    bounds: Collection[str],
    *,
    shared: bool = False,
    adaptive: bool = False,
    shares: bool = False,
) -> Iterator[BadValueError]:
    """Yield what is wrong with which quotas a rule sets, for one with these keys.

    `shares`: its clients share a budget, which bounds them.
    """
    if not adaptive:
        if not (bounds or shares):
            yield BadValueError("sets no quota", f"add one of {', '.join(QuotaKind)}")
        return
    if QuotaKind.CONSUMER_BYTE_RATE not in bounds:
        fix = "add consumer_byte_rate to the rule, the most that the query may ever read"
        yield BadValueError("has no bound to stay below", fix, "adaptive")
    if shared:
        message = "does not go with scope shared, as each query has batches of its own"
        yield BadValueError(message, "remove scope: shared", "adaptive")
    if "client-id" not in keys and "client-id-prefix" not in keys:
        fix = (
            "add client-id or client-id-prefix to the rule; client-id: <default> fits every client"
        )
        yield BadValueError("names no query: a query is known by its client id", fix, "adaptive")


def is_open(keys: Mapping[str, str], scope: str) -> bool:
    """Return whether clients decide how many entities a rule with these keys has."""
    named = keys.keys()
    is_for_many = DEFAULT in keys.values() or "client-id-prefix" in named
    return scope == "each" and (is_for_many or named == {"listener"})


def parse_scope(value: object) -> str:
    """Return a rule's scope. Raises BadValueError for anything else."""
    if not isinstance(value, str) or value not in ("each", "shared"):
        raise BadValueError(f"{shown(value)} is not known here", "write each or shared")
    return value


def parse_prefix(value: object) -> str:
    """Return the text of a client id prefix. Raises BadValueError for anything else."""
    prefix = parse_text(value)
    if prefix == DEFAULT:
        raise BadValueError(f"{DEFAULT} is no prefix", f"write client-id: {DEFAULT}")
    return prefix


def check_keys(keys: Mapping[str, object]) -> None:
    """Raise BadValueError unless these are keys with values that one rule can have."""
    for key, value in keys.items():
        if key not in RULE_KEYS:
            raise BadValueError(f"{shown(key)} is not known here", f"use {', '.join(RULE_KEYS)}")
        try:
            text = parse_prefix(value) if key == "client-id-prefix" else parse_text(value)
            text.encode()
        except BadValueError as error:
            raise BadValueError(f"{key}: {error.message}", error.fix) from None
        except UnicodeEncodeError:
            raise BadValueError(f"{key} is not valid text: {value!r}", "write UTF-8") from None
    for problem in find_key_problems(keys):
        raise problem


def parse_bounds(
    bounds: Mapping[QuotaKind, object] | Mapping[str, object],
) -> dict[QuotaKind, float]:
    """Return bounds, bytes/s or percent. Raises BadValueError if unknown, not finite or not > 0."""
    parsed: dict[QuotaKind, float] = {}
    for kind, bound in bounds.items():
        if kind not in list(QuotaKind):
            raise BadValueError(f"{shown(kind)} is not known here", f"use {', '.join(QuotaKind)}")
        number = finite(bound)
        if number is None or number <= 0:
            raise BadValueError(f"{kind} is {bound!r}", "give a finite number above 0")
        parsed[QuotaKind(kind)] = number
    return parsed


def finite(value: object) -> float | None:
    """Return a finite number as it is, and None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def selector(keys: Mapping[str, str]) -> str:
    """Return the keys in one line of ASCII, such as `user=alice,client-id=<default>`.

    Equal keys give the same text. In values but DEFAULT all except letters, digits and `_.-~` is
    quoted as in URLs. Raises ValueError as `check_keys`.
    """
    check_keys(keys)
    return ",".join(
        f"{key}={keys[key] if keys[key] == DEFAULT else quote(keys[key], safe='')}"
        for key in KEYS
        if key in keys
    )


def parse_selector(text: str) -> dict[str, str]:
    """Return the keys that a selector names, in any order; values may be quoted or not.

    Unquote a text from a URL once before. Raises ValueError for anything else, or as `check_keys`.
    """
    keys: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not equals or "=" in value:
            raise ValueError(f"{part!r} is not KEY=VALUE: quote , = and % in a value as in URLs")
        if key in keys:
            raise ValueError(f"names {key} twice")
        try:
            if BROKEN_ESCAPE.search(value):
                raise ValueError
            keys[key] = unquote(value, errors="strict")
        except ValueError:  # UnicodeDecodeError is one
            raise ValueError(f"{key}: {value!r} is not quoted as in URLs") from None
    check_keys(keys)
    return keys
