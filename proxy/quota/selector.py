"""Name the clients of a rule in one line, for URLs and for keys of the state."""

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from .rules import DEFAULT

KEYS = ("listener", "user", "client-id", "client-id-prefix")
"""What a rule can ask of a client, in the order of a selector."""

BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


def check_keys(keys: Mapping[str, str]) -> None:
    """Raise ValueError unless these are keys with values that one rule can have."""
    if not keys:
        raise ValueError(f"names no client: give at least one of {', '.join(KEYS)}")
    for key, value in keys.items():
        if key not in KEYS:
            raise ValueError(f"{key!r} is not known here: the keys are {', '.join(KEYS)}")
        if not isinstance(value, str) or not value:
            raise ValueError(f"{key} has no value")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key} is not valid text: {value!r}") from None
    if "client-id" in keys and "client-id-prefix" in keys:
        raise ValueError("names both a client-id and a client-id-prefix: give one of them")
    if keys.get("client-id-prefix") == DEFAULT:
        raise ValueError(f"{DEFAULT} is no prefix: give client-id={DEFAULT}")


def selector(keys: Mapping[str, str]) -> str:
    """Return the keys in one line of ASCII, such as `user=alice,client-id=<default>`.

    Equal keys give the same text, whatever their order. In values everything but letters, digits
    and `_.-~` is quoted as in URLs; DEFAULT stays as it is. Raises ValueError as `check_keys`.
    """
    check_keys(keys)
    return ",".join(
        f"{key}={keys[key] if keys[key] == DEFAULT else quote(keys[key], safe='')}"
        for key in KEYS
        if key in keys
    )


def parse_selector(text: str) -> dict[str, str]:
    """Return the keys that a selector names, in any order; values may be quoted or not.

    Where the text is part of a URL, it is to be unquoted once before, as HTTP servers do: then `,`,
    `=` and `%` in a value are quoted twice in the URL, and all else may be quoted once.

    Raises:
        ValueError: it is not `KEY=VALUE,...`, names a key twice, or as `check_keys`.

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
