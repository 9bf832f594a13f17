"""What makes a quota rule: the one set of checks for the file, for overrides, and for `Rule`.

And the selector, which names the clients of a rule in one line, for URLs and for keys of the state.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Final
from urllib.parse import quote, unquote

from .entities import DEFAULT, FORESEEN_KINDS, QuotaKind
from .values import MIN_NUMBER, BadValueError, format_number, parse_text, shown

CLIENT_KEYS: Final = ("user", "client-id", "client-id-prefix", "listener")
"""What a rule can ask of a client."""

TOPIC_KEYS: Final = ("topic", "topic-prefix")
"""Of what a client reads or writes; with one of them a rule bounds no more than that."""

RULE_KEYS: Final = (*CLIENT_KEYS, *TOPIC_KEYS)

PREFIX_KEYS: Final = frozenset({"client-id-prefix", "topic-prefix"})

BUDGET_KEY: Final = "budget"
"""Stands for the clients of a budget's rules; with it there is no other key."""

KEYS = ("listener", "user", "client-id", "client-id-prefix", *TOPIC_KEYS)
"""The keys of a rule in the order of a selector."""

TOPIC_NAME: Final = re.compile(r"(?!\.{1,2}$)[a-zA-Z0-9._-]{1,249}")
"""Kafka's own rule (its class `Topic`), which also forbids the names of directories."""

_TOPIC_FIX = "write 1 to 249 letters, digits and characters of ._-"
_BEGINNING = re.compile(r"[a-zA-Z0-9._-]{1,249}")

BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def find_key_problems(keys: Collection[str]) -> Iterator[BadValueError]:
    """Yield what is wrong with the keys that a rule names."""
    if not keys:
        every = f"client-id: {DEFAULT} fits every client"
        fix = f"add one of {', '.join(CLIENT_KEYS)}; {every}"
        yield BadValueError("fits no client: it has no key", fix)
    if "client-id" in keys and "client-id-prefix" in keys:
        yield BadValueError("has both client-id and client-id-prefix", "keep one of the two")
    if "topic" in keys and "topic-prefix" in keys:
        yield BadValueError("has both topic and topic-prefix", "keep one of the two")


def find_bound_conflicts(
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
    if BUDGET_KEY in keys:
        for kind in bounds:
            if kind not in FORESEEN_KINDS:
                yield BadValueError("is nothing that a budget has", "remove it", str(kind))
    if topic_keys := [key for key in TOPIC_KEYS if key in keys]:
        yield from _find_topic_problems(topic_keys[0], bounds, adaptive=adaptive, shares=shares)
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


def _find_topic_problems(
    key: str, bounds: Collection[str], *, adaptive: bool, shares: bool
) -> Iterator[BadValueError]:
    """Yield what a rule sets that cannot be told for a topic."""
    for kind in bounds:
        if kind not in FORESEEN_KINDS:
            message = f"is of clients, not of what they read or write, and does not go with {key}"
            fix = f"write it into a rule without {key}"
            yield BadValueError(message, fix, str(kind))
    if adaptive:
        message = f"follows all that a query reads, and does not go with {key}"
        yield BadValueError(message, f"remove it, or {key}", "adaptive")
    if shares:
        message = f"is charged with whole responses, before their topics are known: not with {key}"
        yield BadValueError(message, "write it into the rule of these clients", "budget")


def parse_scope(value: object) -> str:
    """Return a rule's scope. Raises BadValueError for anything else."""
    if not isinstance(value, str) or value not in ("each", "shared"):
        raise BadValueError(f"{shown(value)} is not known here", "write each or shared")
    return value


def parse_client_id_prefix(value: object) -> str:
    """Return the text of a client id prefix. Raises BadValueError for anything else."""
    prefix = parse_text(value)
    if prefix == DEFAULT:
        raise BadValueError(f"{DEFAULT} is no prefix", f"write client-id: {DEFAULT}")
    return prefix


def parse_topic(value: object) -> str:
    """Return the name of a topic. Raises BadValueError for anything else."""
    name = parse_text(value)
    if not TOPIC_NAME.fullmatch(name):
        raise BadValueError(f"{shown(name)} is no name of a topic", _TOPIC_FIX)
    return name


def parse_topic_prefix(value: object) -> str:
    """Return how names of topics begin. Raises BadValueError for anything else."""
    prefix = parse_text(value)
    if not _BEGINNING.fullmatch(prefix):
        raise BadValueError(f"{shown(prefix)} begins no name of a topic", _TOPIC_FIX)
    return prefix


_PARSERS = {
    "client-id-prefix": parse_client_id_prefix,
    "topic": parse_topic,
    "topic-prefix": parse_topic_prefix,
}


def check_rule_keys(keys: Mapping[str, object], known: Collection[str] = RULE_KEYS) -> None:
    """Raise BadValueError unless these are keys, of those known, that one rule can have."""
    if BUDGET_KEY in keys and known is RULE_KEYS:
        known = (BUDGET_KEY,)
    for key, value in keys.items():
        if key not in known:
            raise BadValueError(f"{shown(key)} is not known here", f"use {', '.join(known)}")
        try:
            _PARSERS.get(key, parse_text)(value).encode()
        except BadValueError as error:
            raise BadValueError(f"{key}: {error.message}", error.fix) from None
        except UnicodeEncodeError:
            raise BadValueError(f"{key} is not valid text: {value!r}", "write UTF-8") from None
    for problem in find_key_problems(keys):
        raise problem


def parse_quota_bounds(
    bounds: Mapping[QuotaKind, object] | Mapping[str, object],
) -> dict[QuotaKind, float]:
    """Return bounds, bytes/s or percent. Raises BadValueError if unknown, not finite or not > 0."""
    parsed: dict[QuotaKind, float] = {}
    for kind, bound in bounds.items():
        if kind not in list(QuotaKind):
            raise BadValueError(f"{shown(kind)} is not known here", f"use {', '.join(QuotaKind)}")
        number = finite_or_none(bound)
        if number is None or number <= 0:
            raise BadValueError(f"{kind} is {bound!r}", "give a finite number above 0")
        if number < MIN_NUMBER:
            raise BadValueError(f"{kind} is {bound!r}", f"give {format_number(MIN_NUMBER)} or more")
        parsed[QuotaKind(kind)] = number
    return parsed


def finite_or_none(value: object) -> float | None:
    """Return a finite number as it is, and None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def format_selector(keys: Mapping[str, str]) -> str:
    """Return the keys in one line of ASCII, such as `user=alice,client-id=<default>`.

    Equal keys give the same text. In values but DEFAULT all except letters, digits and `_.-~` is
    quoted as in URLs. Raises ValueError as `check_rule_keys`.
    """
    check_rule_keys(keys)
    return ",".join(
        f"{key}={keys[key] if keys[key] == DEFAULT else quote(keys[key], safe='')}"
        for key in (*KEYS, BUDGET_KEY)
        if key in keys
    )


def parse_selector(text: str) -> dict[str, str]:
    """Return the keys that a selector names, in any order; values may be quoted or not.

    Unquote a text from a URL once before. Raises ValueError for anything else, or as
    `check_rule_keys`.
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
    check_rule_keys(keys)
    return keys
