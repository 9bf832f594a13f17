"""Name the clients of a rule in one line, for URLs and for keys of the state."""

import re
from collections.abc import Mapping
from urllib.parse import quote, unquote

from .entities import DEFAULT
from .validation import RULE_KEYS, check_keys

KEYS = (*RULE_KEYS[-1:], *RULE_KEYS[:-1])
"""The keys of a rule in the order of a selector."""

BROKEN_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")


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
