"""Compose the rules in force from the file, the cluster, and what operators changed at run time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import Any

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .manager import QuotaManager
from .rules import AdaptiveBound, QuotaSettings, Rule
from .selector import parse_selector, selector
from .validation import finite

NAMESPACE = "quotas/"
"""Where the overrides are in the state; the rest of a record's key is the rule's selector."""

FORM = 1
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


class RuleRegistry:
    """All rules by source, and the only one who gives the manager its rules.

    A rule takes the place of one with the same keys in a weaker source, with all its bounds, until
    it goes. Only whether the bound is adaptive is left to the file: what takes the place of an
    adaptive rule is adaptive too, if it bounds what each consumer reads.

    The manager gets the rules at once, with the overrides that the store has, and after each
    change. Raises StateError when the store, or an override in it, cannot be read.
    """

    def __init__(self, manager: QuotaManager, store: Store, settings: QuotaSettings) -> None:
        self._manager = manager
        self._store = store
        self._settings = settings
        self._kafka: tuple[Rule, ...] = ()
        self._overrides = {
            record.key.removeprefix(NAMESPACE): _load(record) for record in store.items(NAMESPACE)
        }
        self._entries: list[RuleEntry] = []
        self._compose()

    def entries(self) -> list[RuleEntry]:
        """Return all rules in order of precedence; one not in force follows the one that beat it.

        The rules of the file have its numbers, those of other sources the numbers after them.
        """
        return list(self._entries)

    def put(
        self,
        keys: Mapping[str, str],
        bounds: Mapping[QuotaKind, float],
        scope: str = "each",
        by: str | None = None,
        at_s: float | None = None,
    ) -> RuleEntry:
        """Make an override, in the place of one with the same keys, and keep it.

        Bounds are bytes/s or percent, `at_s` is in seconds of the Unix epoch. Raises ValueError
        when these make no rule, and StateError when it was not kept; it is not in force then.
        """
        name = selector(keys)
        entry = _override(keys, bounds, scope, by, at_s)
        value: Json = {
            "bounds": {str(kind): bound for kind, bound in entry.rule.bounds.items()},
            "scope": scope,
            "by": by,
            "at_s": entry.at_s,
        }
        self._store.put(NAMESPACE + name, value, FORM)
        self._overrides[name] = entry
        self._compose()
        return next(made for made in self._entries if selector(made.rule.keys) == name)

    def delete(self, keys: Mapping[str, str]) -> bool:
        """Delete an override; return whether one had exactly these keys. Raises as `put`."""
        name = selector(keys)
        if name not in self._overrides:
            return False
        self._store.delete(NAMESPACE + name)
        del self._overrides[name]
        self._compose()
        return True

    def use_file(self, settings: QuotaSettings) -> None:
        """Put in force the configuration's settings and rules."""
        self._settings = settings
        self._compose()

    def use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put in force the cluster's rules, in the place of those that it had before."""
        rules = tuple(rules)
        if rules != self._kafka:
            self._kafka = rules
            self._compose()

    def _compose(self) -> None:
        strongest_first = chain(
            (self._overrides[name] for name in sorted(self._overrides)),
            (RuleEntry(rule, RuleOrigin.KAFKA) for rule in self._kafka),
        )
        adaptive = {
            selector(rule.keys): rule.adaptive for rule in self._settings.rules if rule.adaptive
        }
        numbered = (
            replace(entry, rule=replace(_adapted(entry.rule, adaptive), number=number))
            for number, entry in enumerate(strongest_first, len(self._settings.rules))
        )
        of_file = (RuleEntry(rule, RuleOrigin.FILE) for rule in self._settings.rules)
        by_name: dict[str, list[RuleEntry]] = {}
        for entry in chain(numbered, of_file):
            same = by_name.setdefault(selector(entry.rule.keys), [])
            same.append(replace(entry, in_force=not same))
        in_order = sorted(by_name.items(), key=lambda item: (item[1][0].rule.rank, item[0]))
        self._entries = [entry for _, same in in_order for entry in same]
        rules = tuple(entry.rule for entry in self._entries if entry.in_force)
        self._manager.update(replace(self._settings, rules=rules))


def _adapted(rule: Rule, adaptive: Mapping[str, AdaptiveBound]) -> Rule:
    """Return a rule with what the file's rule for the same keys says of an adaptive bound."""
    if rule.scope != "each" or QuotaKind.CONSUMER_BYTE_RATE not in rule.bounds:
        return rule
    return replace(rule, adaptive=adaptive.get(selector(rule.keys)))


def _override(
    keys: Mapping[str, str], bounds: Mapping[QuotaKind, float], scope: Any, by: object, at_s: object
) -> RuleEntry:
    """Make the entry of an override from what an operator or the state says; check all of it."""
    if not (by is None or isinstance(by, str)):
        raise ValueError(f"who made it is {by!r}, not a name")
    made_s = finite(at_s)
    if made_s is None and at_s is not None:
        raise ValueError(f"when it was made is {at_s!r}, not a time")
    place = f"override by {by}" if by else "override"
    names: Any = {key.replace("-", "_"): value for key, value in keys.items()}
    rule = Rule(**names, scope=scope, bounds=bounds, place=place)
    return RuleEntry(rule, RuleOrigin.OVERRIDE, by, made_s)


def _load(record: Record) -> RuleEntry:
    name = record.key.removeprefix(NAMESPACE)
    try:
        if record.version != FORM:
            known = f"this version of quota-proxy knows {FORM}"
            raise ValueError(f"it has form {record.version}, {known}")
        keys = parse_selector(name)
        if selector(keys) != name:
            raise ValueError("its name is not written as quota-proxy writes it")
        match record.value:
            case {"bounds": dict(bounds), "scope": scope, "by": by, "at_s": at_s}:
                return _override(keys, bounds, scope, by, at_s)
        raise ValueError("it lacks bounds, scope, by or at_s")
    except ValueError as error:
        message = f"the override {record.key!r} in the state cannot be read: {error}"
        fix = "start the version that wrote it, restore the state from a backup, or remove this"
        raise StateError(message, f"{fix} record") from error
