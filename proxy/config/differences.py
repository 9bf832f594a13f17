"""Finds what a changed configuration sets differently, key by key, for those who read of it."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from proxy.config.models import Config
from proxy.quota.entities import QuotaKind
from proxy.quota.validation import RULE_KEYS

MAX_SHOWN_KEYS = 100
"""Keys of one change that are shown; a file may be new as a whole."""

MAX_SHOWN_CHARS = 200
"""Of one value."""

REST_KEY = "more"
"""Under it stands how many keys are not shown."""

Values = dict[str, object]


def find_differences(before: Config, after: Config) -> tuple[Values, Values]:
    """Return what the keys that differ had, and what they have; one that is not set is missing.

    Items of lists are told apart by their names, not by their places.
    """
    old, new = (
        dict(_flat(config.model_dump(mode="json", by_alias=True))) for config in (before, after)
    )
    keys = [key for key in old | new if old.get(key) != new.get(key)]
    shown = list(islice(keys, MAX_SHOWN_KEYS))
    parts = tuple({key: part[key] for key in shown if key in part} for part in (old, new))
    if len(keys) > len(shown):
        for part in parts:
            part[REST_KEY] = f"{len(keys) - len(shown)} further keys"
    return parts[0], parts[1]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each key below; what is not set is left out."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from _flat(item, f"{path}[{_name(item) or number}]")
    elif value not in (None, []):
        yield path, _shown(path.rpartition(".")[2], value)


def _name(item: Mapping[str, Any]) -> str:
    """Return how an item of a list is called; a rule by the clients that it is for."""
    keys = (f"{key}={item[key]}" for key in RULE_KEYS if item.get(key) is not None)
    return str(item.get("name") or ",".join(keys))


def _shown(key: str, value: object) -> object:
    if isinstance(value, bool | int | float):
        return QuotaKind(key).unit.format(value) if key in set(QuotaKind) else value
    text = str(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."
