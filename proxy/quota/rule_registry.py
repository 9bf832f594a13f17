"""Compose the rules in force from the file, the cluster, and what operators changed at run time."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .manager import QuotaManager
from .rules import AdaptiveBound, QuotaSettings, Rule, RuleTable
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


@dataclass(frozen=True, slots=True)
class RuleSources:
    """All rules by source, as of one moment."""

    settings: QuotaSettings
    """The configuration's, with the rules of the file."""
    kafka: tuple[Rule, ...]
    overrides: Mapping[str, RuleEntry]
    """By the selectors of their rules."""


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


Compose = Callable[[], ComposedRules]


async def _here(compose: Compose) -> ComposedRules:
    return compose()


class RuleRegistry:
    """All rules by source, and the only one who gives the manager its rules.

    A rule takes the place of one with the same keys in a weaker source, with all its bounds, until
    it goes. Only whether the bound is adaptive, and whether clients are expected to be at it, is
    left to the file: what takes the place of an adaptive rule is adaptive too, if it bounds what
    each consumer reads.

    The manager gets the rules at once, with the overrides that the store has, and after each
    change. To compose them takes some 0.2 s for 10,000: `elsewhere` may do it in another thread.
    The rules before stay in force meanwhile. Changes may overlap: when one returns, it is in force
    with all that were called before it, and none that was called later is undone.

    Raises StateError when the store, or an override in it, cannot be read.
    """

    def __init__(
        self,
        manager: QuotaManager,
        store: Store,
        settings: QuotaSettings,
        elsewhere: Callable[[Compose], Awaitable[ComposedRules]] = _here,
    ) -> None:
        self._manager = manager
        self._store = store
        self._elsewhere = elsewhere
        self._sources = RuleSources(settings, (), read_overrides(store))
        self._changes = self._latest = 0
        self._put_in_force(compose(self._sources))

    def entries(self) -> list[RuleEntry]:
        """Return all rules in order of precedence; one not in force follows the one that beat it.

        The rules of the file have its numbers, those of other sources the numbers after them.
        """
        return list(self._composed.entries)

    def in_force(self) -> Mapping[str, RuleEntry]:
        """Return the rules in force by their selectors."""
        return self._composed.in_force

    async def put(
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
        self._store.put(NAMESPACE + name, _value(entry), FORM)
        composed = await self._use(overrides={**self._sources.overrides, name: entry})
        return composed.in_force[name]

    async def delete(self, keys: Mapping[str, str]) -> bool:
        """Delete an override; return whether one had exactly these keys. Raises as `put`."""
        name = selector(keys)
        overrides = dict(self._sources.overrides)
        if overrides.pop(name, None) is None:
            return False
        self._store.delete(NAMESPACE + name)
        await self._use(overrides=overrides)
        return True

    async def use_file(self, settings: QuotaSettings) -> None:
        """Put in force the configuration's settings and rules."""
        await self._use(settings=settings)

    def use_store(self, store: Store) -> None:
        """Keep the overrides in another store from now on. Raises StateError."""
        overrides = self._sources.overrides.items()
        store.put_many(
            Record.of(NAMESPACE + name, _value(entry), FORM) for name, entry in overrides
        )
        self._store = store

    async def use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put in force the cluster's rules, in the place of those that it had before."""
        rules = tuple(rules)
        if rules != self._sources.kafka:
            await self._use(kafka=rules)

    async def _use(self, **changed: Any) -> ComposedRules:
        """Put other sources in force, unless later ones are by then."""
        self._sources = replace(self._sources, **changed)
        self._changes += 1
        change = self._changes
        try:
            composed = await self._elsewhere(partial(compose, self._sources))
        except BaseException:  # such as a cancelled request: what is kept must be in force
            self._latest = self._changes
            self._put_in_force(compose(self._sources))
            raise
        if change > self._latest:
            self._latest = change
            self._put_in_force(composed)
        return composed

    def _put_in_force(self, composed: ComposedRules) -> None:
        self._composed = composed
        self._manager.update(composed.settings, composed.table)


def compose(sources: RuleSources) -> ComposedRules:
    """Return the rules in force, and those that they beat."""
    settings, overrides = sources.settings, sources.overrides
    strongest_first = chain(
        (overrides[name] for name in sorted(overrides)),
        (RuleEntry(rule, RuleOrigin.KAFKA) for rule in sources.kafka),
    )
    adaptive = {selector(rule.keys): rule.adaptive for rule in settings.rules if rule.adaptive}
    expected = {selector(rule.keys) for rule in settings.rules if rule.expected}
    numbered = (
        replace(
            entry,
            rule=replace(
                _adapted(entry.rule, adaptive),
                number=number,
                expected=selector(entry.rule.keys) in expected,
            ),
        )
        for number, entry in enumerate(strongest_first, len(settings.rules))
    )
    of_file = (RuleEntry(rule, RuleOrigin.FILE) for rule in settings.rules)
    by_name: dict[str, list[RuleEntry]] = {}
    for entry in chain(numbered, of_file):
        same = by_name.setdefault(selector(entry.rule.keys), [])
        same.append(replace(entry, in_force=not same))
    in_order = sorted(by_name.items(), key=lambda item: (item[1][0].rule.rank, item[0]))
    entries = tuple(entry for _, same in in_order for entry in same)
    in_force = {name: same[0] for name, same in in_order}
    rules = tuple(entry.rule for entry in in_force.values())
    return ComposedRules(entries, in_force, replace(settings, rules=rules), RuleTable(rules))


def read_overrides(store: Store) -> dict[str, RuleEntry]:
    """Return the overrides that a store has, by selector. Raises StateError for a bad one."""
    return {record.key.removeprefix(NAMESPACE): _load(record) for record in store.items(NAMESPACE)}


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


def _value(entry: RuleEntry) -> Json:
    """Return what is kept of an override."""
    return {
        "bounds": {str(kind): bound for kind, bound in entry.rule.bounds.items()},
        "scope": entry.rule.scope,
        "by": entry.by,
        "at_s": entry.at_s,
    }


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
