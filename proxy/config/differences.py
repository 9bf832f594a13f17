"""Finds what a changed configuration sets differently, key by key, for those who read of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from metrics.clock import MS_PER_SECOND
from proxy.config.models import Config
from proxy.config.rule_models import RuleSection
from proxy.quota.entities import QuotaKind
from proxy.quota.fields import fields_of, keys_of_section, yaml_key

MAX_SHOWN_KEYS = 50
"""Keys of one change that are shown; a file may be new as a whole."""

MAX_VALUE_CHARS = 100
"""Of one value."""

REST_KEY = "more"
"""Under it stands how many keys are not shown."""

ShownValues = dict[str, object]


def find_differences(before: Config, after: Config) -> tuple[ShownValues, ShownValues]:
    """Return what the keys that differ had, and what they have; one that is not set is missing.

    Items of lists are told apart by their names, not by their places.
    """
    return _cut(list(_differing("", before, after)))


def find_in_force_changes(
    before: Mapping[str, bool], after: Mapping[str, bool]
) -> tuple[ShownValues, ShownValues]:
    """Return which rules and budgets were in force and are not any more, or the other way round.

    Those that are new, or gone, were changed otherwise.
    """
    words = {True: "in force", False: "not in force"}
    both = ((title, was, after.get(title, was)) for title, was in before.items())
    return _cut([(title, words[was], words[is_in]) for title, was, is_in in both if was != is_in])


def _cut(found: Sequence[tuple[str, Any, Any]]) -> tuple[ShownValues, ShownValues]:
    """Return what there was, and what there is now, of keys with both values."""
    was = {key: _shown(key, old) for key, old, _ in found[:MAX_SHOWN_KEYS] if old is not None}
    is_now = {key: _shown(key, new) for key, _, new in found[:MAX_SHOWN_KEYS] if new is not None}
    if len(found) > MAX_SHOWN_KEYS:
        was[REST_KEY] = is_now[REST_KEY] = f"{len(found) - MAX_SHOWN_KEYS} further keys"
    return was, is_now


def describe_rule_counts(before: Config, after: Config) -> str:
    """Return how many rules there were, are, and came or went; empty where none did either."""
    old, new = ({_name(rule) for rule in config.quotas.rules} for config in (before, after))
    counts = (len(new - old), "added"), (len(old - new), "removed")
    told = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"rules {len(old)} -> {len(new)} ({told})" if told else ""


def _differing(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys below that differ, with both values; None for what is not set."""
    if before == after:
        return
    old, new = _parts(before), _parts(after)
    if old is None or new is None:
        yield path.removeprefix("."), before, after
        return
    for key in old | new:
        yield from _differing(path + key, old.get(key), new.get(key))


def _parts(value: Any) -> dict[str, Any] | None:
    """Return what a value consists of, by what its path goes on with; None: it has no parts."""
    fields = fields_of(type(value))
    if fields is not None:
        parts = ((field.alias or yaml_key(name), name) for name, field in fields.items())
        return {f".{key}": _in_seconds(name, getattr(value, name)) for key, name in parts}
    if isinstance(value, tuple) and all(fields_of(type(item)) is not None for item in value):
        return {f"[{_name(item) or number}]": item for number, item in enumerate(value)}
    return {} if value is None else None


def _in_seconds(name: str, value: Any) -> Any:
    return value / MS_PER_SECOND if name.endswith("_ms") and value is not None else value


def _name(item: Any) -> str:
    """Return how an item of a list is called; a rule by the clients that it is for."""
    if isinstance(item, RuleSection):
        keys = ",".join([f"{key}={value}" for key, value in item.rule_keys.items()])
        return keys if item.when is None else f"{keys}; {item.when}"
    return str(item.name) if "name" in keys_of_section(type(item)) else ""


def _shown(path: str, value: object) -> object:
    key = path.rpartition(".")[2]
    if isinstance(value, bool | int | float):
        return QuotaKind(key).unit.format(value) if key in set(QuotaKind) else value
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."
