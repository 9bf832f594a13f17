"""Rules by source: what the state keeps of overrides and pauses, and what all of them come to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any, TypeAlias

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .rules import ALL_CLIENTS, QuotaPause, QuotaSettings, Rule, RuleTable
from .selector import parse_selector, selector
from .validation import finite

OVERRIDES = "quotas/"
"""Where the overrides are in the state; the rest of a record's key is the rule's selector."""

PAUSES = "pauses/"
"""Where the pauses are in the state; the rest of a record's key is the pause's name."""

CHANGES_SCHEMA = 1
"""Version of what is written there."""


class RuleOrigin(StrEnum):
    """Where a rule comes from. For the same keys OVERRIDE beats KAFKA, and KAFKA beats FILE."""

    OVERRIDE = "override"
    """An operator, at run time; kept in the state."""
    KAFKA = "kafka"
    """The cluster's own client quotas."""
    FILE = "file"
    """The configuration."""


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule, and how it got here."""

    rule: Rule
    source: RuleOrigin
    by: str | None = None
    """Who made the override; None when not known, and for other sources."""
    at_s: float | None = None
    """When, in seconds of the Unix epoch; None as for `by`."""
    in_force: bool = True
    """False when a rule of a stronger source has the same keys."""
    enforce: bool | None = None
    """What an override says of it; None: as the file's rule with the same keys."""
    until_s: float | None = None
    """When an override ends by itself, as `at_s`; None: not at all."""


KeptChange: TypeAlias = RuleEntry | QuotaPause
"""What an operator changes at run time: an override, or a pause."""


@dataclass(frozen=True, slots=True)
class ComposedRules:
    """What the sources come to."""

    entries: tuple[RuleEntry, ...]
    """In order of precedence, those not in force too."""
    in_force: Mapping[str, RuleEntry]
    """By the selectors of their rules."""
    settings: QuotaSettings
    """With the rules in force."""
    table: RuleTable
    """Of the rules in force."""


@dataclass(frozen=True, slots=True)
class RuleSources:
    """All rules by source, as of one moment."""

    settings: QuotaSettings
    """The configuration's, with the rules of the file."""
    kafka: tuple[Rule, ...]
    kept: Mapping[str, KeptChange]
    """Overrides and pauses by the keys of their records."""

    @property
    def overrides(self) -> list[RuleEntry]:
        """The overrides in the order of their selectors."""
        return [each for _, each in sorted(self.kept.items()) if isinstance(each, RuleEntry)]

    @property
    def pauses(self) -> list[QuotaPause]:
        """The pauses in the order of their making."""
        return [each for each in self.kept.values() if isinstance(each, QuotaPause)]

    def compose(self) -> ComposedRules:
        """Return the rules in force, and those that they beat."""
        settings = self.settings
        of_file = {selector(rule.keys): RuleEntry(rule, RuleOrigin.FILE) for rule in settings.rules}
        of_kafka = (RuleEntry(rule, RuleOrigin.KAFKA) for rule in self.kafka)
        by_name: dict[str, list[RuleEntry]] = {}
        for number, entry in enumerate(chain(self.overrides, of_kafka), len(settings.rules)):
            name = selector(entry.rule.keys)
            replaced = _in_place_of(of_file.get(name), entry, number)
            by_name.setdefault(name, []).append(replaced)
        for name, entry in of_file.items():
            by_name.setdefault(name, []).append(entry)
        in_order = sorted(by_name.items(), key=lambda item: (item[1][0].rule.rank, item[0]))
        in_force = {name: same[0] for name, same in in_order}
        entries = tuple(
            entry if entry is same[0] else replace(entry, in_force=False)
            for _, same in in_order
            for entry in same
        )
        rules = tuple(entry.rule for entry in in_force.values())
        table = RuleTable(rules, enforce=settings.enforce, pauses=self.pauses)
        return ComposedRules(entries, in_force, replace(settings, rules=rules), table)


def _in_place_of(of_file: RuleEntry | None, entry: RuleEntry, number: int) -> RuleEntry:
    """Return an entry with a number, and with what the file's rule for its keys leaves open."""
    rule, enforce = entry.rule, entry.enforce is not False
    if of_file is None:
        return replace(entry, rule=replace(rule, number=number, enforce=enforce))
    beaten = of_file.rule
    can_adapt = rule.scope == "each" and QuotaKind.CONSUMER_BYTE_RATE in rule.bounds
    rule = replace(
        rule,
        number=number,
        adaptive=beaten.adaptive if can_adapt else None,
        expected=beaten.expected,
        enforce=beaten.enforce if entry.enforce is None else enforce,
    )
    return replace(entry, rule=rule)


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
