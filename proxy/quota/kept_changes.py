"""The overrides and pauses that the state keeps: how a record of each is written and read."""

from collections.abc import Mapping
from typing import Any

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .pauses import PAUSES, QuotaPause, parse_origin, read_pause
from .rule_sources import RuleEntry, RuleOrigin
from .rules import Rule
from .selector import parse_selector, selector
from .validation import finite

OVERRIDES = "quotas/"
"""Where the overrides are in the state; the rest of a record's key is the rule's selector."""

OVERRIDES_SCHEMA = 1
"""Version of what is written there."""


def read_overrides(store: Store) -> dict[str, RuleEntry]:
    """Return the overrides that a store has, by selector. Raises StateError for a bad one."""
    return {record.key.removeprefix(OVERRIDES): _load(record) for record in store.items(OVERRIDES)}


def read_pauses(store: Store) -> dict[str, QuotaPause]:
    """Return the pauses that a store has, by name. Raises StateError for a bad one."""
    return {record.key.removeprefix(PAUSES): _load_pause(record) for record in store.items(PAUSES)}


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
    by, made_s = parse_origin(by, at_s)
    end_s = finite(until_s)
    if end_s is None and until_s is not None:
        raise ValueError(f"when it ends is {until_s!r}, not a time")
    if not (enforce is None or isinstance(enforce, bool)):
        raise ValueError(f"whether it is enforced is {enforce!r}, not true or false")
    place = f"override by {by}" if by else "override"
    names: Any = {key.replace("-", "_"): value for key, value in keys.items()}
    rule = Rule(**names, scope=scope, bounds=bounds, place=place)
    return RuleEntry(rule, RuleOrigin.OVERRIDE, by, made_s, enforce=enforce, until_s=end_s)


def override_record(entry: RuleEntry) -> Record:
    """Return what is kept of an override."""
    value: dict[str, Json] = {
        "bounds": {str(kind): bound for kind, bound in entry.rule.bounds.items()},
        "scope": entry.rule.scope,
        "by": entry.by,
        "at_s": entry.at_s,
    }
    if entry.enforce is not None:  # an older version reads the rest
        value["enforce"] = entry.enforce
    if entry.until_s is not None:
        value["until_s"] = entry.until_s
    return Record.of(OVERRIDES + selector(entry.rule.keys), value, OVERRIDES_SCHEMA)


def _load(record: Record) -> RuleEntry:
    name = record.key.removeprefix(OVERRIDES)
    try:
        record.check_form(OVERRIDES_SCHEMA)
        keys = parse_selector(name)
        if selector(keys) != name:
            raise ValueError("its name is not written as quota-proxy writes it")
        match record.value:
            case {"bounds": dict(bounds), "scope": scope, "by": by, "at_s": at_s, **more}:
                enforce, until_s = more.get("enforce"), more.get("until_s")
                return make_override(
                    keys, bounds, scope, by, at_s, enforce=enforce, until_s=until_s
                )
        raise ValueError("it lacks bounds, scope, by or at_s")
    except ValueError as error:
        raise _unreadable("override", record, error) from error


def _load_pause(record: Record) -> QuotaPause:
    try:
        return read_pause(record)
    except ValueError as error:
        raise _unreadable("pause", record, error) from error


def _unreadable(what: str, record: Record, error: ValueError) -> StateError:
    message = f"the {what} {record.key!r} in the state cannot be read: {error}"
    fix = "start the version that wrote it, restore the state from a backup, or remove this record"
    return StateError(message, fix)
