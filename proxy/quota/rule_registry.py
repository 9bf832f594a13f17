"""Compose the rules in force from the file, the cluster, and what operators changed at run time."""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .manager import QuotaManager
from .pauses import PAUSES, QuotaPause, parse_origin, pause_name, read_pause
from .rules import AdaptiveBound, QuotaSettings, Rule, RuleTable
from .selector import parse_selector, selector
from .validation import finite

NAMESPACE = "quotas/"
"""Where the overrides are in the state; the rest of a record's key is the rule's selector."""

MAX_PAUSES = 100
"""Each is compared with each client when rules are looked up."""

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
    enforce: bool | None = None
    """What an override says of it; None: as the file's rule with the same keys."""
    until_s: float | None = None
    """When an override ends by itself, as `at_s`; None: not at all."""


@dataclass(frozen=True, slots=True)
class RuleSources:
    """All rules by source, as of one moment."""

    settings: QuotaSettings
    """The configuration's, with the rules of the file."""
    kafka: tuple[Rule, ...]
    overrides: Mapping[str, RuleEntry]
    """By the selectors of their rules."""
    pauses: Mapping[str, QuotaPause]
    """By their names."""

    def next_end_s(self) -> float:
        """Return when the first override or pause ends by itself."""
        ends = (entry.until_s for entry in self.overrides.values() if entry.until_s is not None)
        return min(chain(ends, (pause.until_s for pause in self.pauses.values())), default=math.inf)


@dataclass(frozen=True, slots=True)
class Ended:
    """What has ended by itself."""

    overrides: tuple[RuleEntry, ...] = ()
    pauses: tuple[QuotaPause, ...] = ()


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


NOTHING_ENDED = Ended()

Compose = Callable[[], ComposedRules]


async def _here(compose: Compose) -> ComposedRules:
    return compose()


class RuleRegistry:
    """All rules by source, and the only one who gives the manager its rules.

    A rule takes the place of one with the same keys in a weaker source, with all its bounds, until
    it goes. Only whether the bound is adaptive and enforced, and whether clients are expected to be
    at it, is left to the file: what takes the place of an adaptive rule is adaptive too, if it
    bounds what each consumer reads, and what takes the place of a rule that is not enforced is not,
    unless an override says otherwise.

    The manager gets the rules at once, with the overrides that the store has, and after each
    change. To compose them takes some 0.2 s for 10,000: `elsewhere` may do it in another thread.
    The rules before stay in force meanwhile. Changes may overlap: when one returns, it is in force
    with all that were called before it, and none that was called later is undone.

    Overrides may, and pauses do, end by themselves: call `end_due` at the start, and every second.

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
        self._sources = RuleSources(settings, (), read_overrides(store), read_pauses(store))
        self._next_end_s = self._sources.next_end_s()
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
        *,
        enforce: bool | None = None,
        until_s: float | None = None,
    ) -> RuleEntry:
        """Make an override, in the place of one with the same keys, and keep it.

        Bounds are bytes/s or percent, times in seconds of the Unix epoch. Raises ValueError when
        these make no rule, and StateError when it was not kept; it is not in force then.
        """
        name = selector(keys)
        entry = _override(keys, bounds, scope, by, at_s, enforce=enforce, until_s=until_s)
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

    @property
    def is_enforced(self) -> bool:
        """Whether the configuration lets rules be enforced at all."""
        return self._sources.settings.enforce

    def pauses(self) -> list[QuotaPause]:
        """Return the pauses in force, that of all clients first."""
        return sorted(
            self._sources.pauses.values(), key=lambda pause: (bool(pause.keys), pause.name)
        )

    async def pause(self, pause: QuotaPause) -> None:
        """Enforce no quota of these clients until a time, in the place of a pause with these keys.

        Raises ValueError for keys that are not those of a rule, or when there are too many, and
        StateError when it was not kept; it is not in force then.
        """
        name, pauses = pause.name, self._sources.pauses
        if name not in pauses and len(pauses) >= MAX_PAUSES:
            raise ValueError(f"there are {MAX_PAUSES} pauses already, and no more are kept")
        self._store.put_many([pause.record()])
        await self._use(pauses={**pauses, name: pause})

    async def resume(self, keys: Mapping[str, str] | None = None) -> list[QuotaPause]:
        """End the pause with these keys, or with None every one; return those that were in force.

        Raises as `pause`.
        """
        pauses = dict(self._sources.pauses)
        names = [*pauses] if keys is None else [pause_name(keys)]
        ended = [pauses.pop(name) for name in names if name in pauses]
        if ended:
            self._store.put_many((), delete=[PAUSES + pause.name for pause in ended])
            await self._use(pauses=pauses)
        return ended

    async def end_due(self, now_s: float) -> Ended:
        """End overrides and pauses whose time has come, at a time since the Unix epoch.

        Raises StateError when they could not be deleted; they have ended all the same.
        """
        sources = self._sources
        if now_s < self._next_end_s:
            return NOTHING_ENDED
        overrides, pauses = dict(sources.overrides), dict(sources.pauses)
        ended = Ended(
            tuple(
                overrides.pop(name)
                for name, entry in sources.overrides.items()
                if entry.until_s is not None and entry.until_s <= now_s
            ),
            tuple(
                pauses.pop(name) for name, pause in sources.pauses.items() if pause.until_s <= now_s
            ),
        )
        await self._use(overrides=overrides, pauses=pauses)
        names = (selector(entry.rule.keys) for entry in ended.overrides)
        gone = [NAMESPACE + name for name in names if name not in self._sources.overrides]
        names = (pause.name for pause in ended.pauses)
        gone += [PAUSES + name for name in names if name not in self._sources.pauses]
        self._store.put_many((), delete=gone)  # but for what was set again meanwhile
        return ended

    async def use_file(self, settings: QuotaSettings) -> None:
        """Put in force the configuration's settings and rules."""
        await self._use(settings=settings)

    def use_store(self, store: Store) -> None:
        """Keep overrides and pauses in another store from now on, in the place of those in it.

        Raises StateError.
        """
        overrides, pauses = self._sources.overrides.items(), self._sources.pauses.values()
        records = [Record.of(NAMESPACE + name, _value(entry), FORM) for name, entry in overrides]
        others = (*store.items(NAMESPACE), *store.items(PAUSES))
        store.put_many(
            [*records, *(pause.record() for pause in pauses)],
            delete=[record.key for record in others],
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
        self._next_end_s = self._sources.next_end_s()
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
    observed = {selector(rule.keys) for rule in settings.rules if not rule.enforce}
    numbered = (
        replace(
            entry,
            rule=replace(
                _adapted(entry.rule, adaptive),
                number=number,
                expected=selector(entry.rule.keys) in expected,
                enforce=_is_enforced(entry, observed),
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
    table = RuleTable(rules, enforce=settings.enforce, pauses=sources.pauses.values())
    return ComposedRules(entries, in_force, replace(settings, rules=rules), table)


def read_overrides(store: Store) -> dict[str, RuleEntry]:
    """Return the overrides that a store has, by selector. Raises StateError for a bad one."""
    return {record.key.removeprefix(NAMESPACE): _load(record) for record in store.items(NAMESPACE)}


def read_pauses(store: Store) -> dict[str, QuotaPause]:
    """Return the pauses that a store has, by name. Raises StateError for a bad one."""
    return {record.key.removeprefix(PAUSES): _load_pause(record) for record in store.items(PAUSES)}


def _adapted(rule: Rule, adaptive: Mapping[str, AdaptiveBound]) -> Rule:
    """Return a rule with what the file's rule for the same keys says of an adaptive bound."""
    if rule.scope != "each" or QuotaKind.CONSUMER_BYTE_RATE not in rule.bounds:
        return rule
    return replace(rule, adaptive=adaptive.get(selector(rule.keys)))


def _is_enforced(entry: RuleEntry, observed: Set[str]) -> bool:
    """Return what an override says, or the file; `observed`: its rules that are not enforced."""
    if entry.enforce is not None:
        return entry.enforce
    return not observed or selector(entry.rule.keys) not in observed


def _override(
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


def _value(entry: RuleEntry) -> Json:
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
    return value


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
            case {"bounds": dict(bounds), "scope": scope, "by": by, "at_s": at_s, **more}:
                enforce, until_s = more.get("enforce"), more.get("until_s")
                return _override(keys, bounds, scope, by, at_s, enforce=enforce, until_s=until_s)
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
