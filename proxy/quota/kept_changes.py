"""The overrides and pauses that the state keeps: how a record of each is written and read."""

from collections.abc import Callable, Mapping
from typing import Any

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .rule_sources import KeptChange, RuleEntry, RuleOrigin
from .rules import ALL_CLIENTS, QuotaPause, Rule
from .selector import parse_selector, selector
from .validation import finite

OVERRIDES = "quotas/"
"""Where the overrides are in the state; the rest of a record's key is the rule's selector."""

PAUSES = "pauses/"
"""Where the pauses are in the state; the rest of a record's key is the pause's name."""

CHANGES_SCHEMA = 1
"""Version of what is written there."""


def make_override(
    keys: Mapping[str, str],
    bounds: Mapping[QuotaKind, float],
    scope: Any,
    by: object,
    at_s: object,
    *,
    enforce: object = None,
    until_s: object = None,
) -> RuleEntry:
    """Make the entry of an override from what an operator or the state says; check all of it."""
    by, made_s = _origin(by, at_s)
    end_s = _time(until_s, "ends")
    if not (enforce is None or isinstance(enforce, bool)):
        raise ValueError(f"whether it is enforced is {enforce!r}, not true or false")
    place = f"override by {by}" if by else "override"
    names: Any = {key.replace("-", "_"): value for key, value in keys.items()}
    rule = Rule(**names, scope=scope, bounds=bounds, place=place)
    return RuleEntry(rule, RuleOrigin.OVERRIDE, by, made_s, enforce=enforce, until_s=end_s)


def change_record(change: KeptChange) -> Record:
    """Return what is kept of an override or a pause."""
    if isinstance(change, QuotaPause):
        paused = {"until_s": change.until_s, "by": change.by, "at_s": change.at_s}
        return Record.of(PAUSES + change.name, paused, CHANGES_SCHEMA)
    value: dict[str, Json] = {
        "bounds": {str(kind): bound for kind, bound in change.rule.bounds.items()},
        "scope": change.rule.scope,
        "by": change.by,
        "at_s": change.at_s,
    }
    more = {"enforce": change.enforce, "until_s": change.until_s}  # an older version reads the rest
    value |= {name: each for name, each in more.items() if each is not None}
    return Record.of(OVERRIDES + selector(change.rule.keys), value, CHANGES_SCHEMA)


def read_changes(store: Store) -> dict[str, KeptChange]:
    """Return a store's changes by their records' keys. Raises StateError for one that is bad."""
    return {
        **{record.key: _read(record, "override", _override) for record in store.items(OVERRIDES)},
        **{record.key: _read(record, "pause", _pause) for record in store.items(PAUSES)},
    }


def _read(record: Record, what: str, change_of: Callable[[str, Json], KeptChange]) -> KeptChange:
    try:
        record.check_form(CHANGES_SCHEMA)
        change = change_of(record.key.partition("/")[2], record.value)
        if change_record(change).key != record.key:
            raise ValueError("its name is not written as quota-proxy writes it")
    except ValueError as error:
        message = f"the {what} {record.key!r} in the state cannot be read: {error}"
        fix = "start the version that wrote it, restore the state from a backup"
        raise StateError(message, f"{fix}, or remove this record") from error
    return change


def _override(name: str, value: Json) -> RuleEntry:
    keys = parse_selector(name)
    match value:
        case {"bounds": dict(bounds), "scope": scope, "by": by, "at_s": at_s, **more}:
            enforce, until_s = more.get("enforce"), more.get("until_s")
            return make_override(keys, bounds, scope, by, at_s, enforce=enforce, until_s=until_s)
    raise ValueError("it lacks bounds, scope, by or at_s")


def _pause(name: str, value: Json) -> QuotaPause:
    match value:
        case {"until_s": until_s, "by": by, "at_s": at_s}:
            end_s = _time(until_s, "ends")
            if end_s is None:
                raise ValueError("when it ends is None, not a time")
            keys = {} if name == ALL_CLIENTS else parse_selector(name)
            return QuotaPause(keys, end_s, *_origin(by, at_s))
    raise ValueError("it lacks until_s, by or at_s")


def _origin(by: object, at_s: object) -> tuple[str | None, float | None]:
    """Return who made something and when, of which either may not be known. Raises ValueError."""
    if not (by is None or isinstance(by, str)):
        raise ValueError(f"who made it is {by!r}, not a name")
    return by, _time(at_s, "was made")


def _time(value: object, what: str) -> float | None:
    """Return a time, or None for None. Raises ValueError for anything else."""
    time_s = finite(value)
    if time_s is None and value is not None:
        raise ValueError(f"when it {what} is {value!r}, not a time")
    return time_s
