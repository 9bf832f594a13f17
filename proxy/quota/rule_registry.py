"""Keep the rules in force: of the file, the cluster, and what operators change at run time.

That is overrides and pauses, which the state keeps.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from proxy.state import Json, Record, StateError, Store

from .entities import QuotaKind
from .manager import QuotaManager
from .rules import (
    ALL_CLIENTS,
    Budget,
    QuotaManagerSettings,
    QuotaPause,
    Rule,
    RuleTable,
    quota_pause_name,
)
from .scheduled_rules import ScheduledSettings, budgets_of
from .validation import BUDGET_KEY, check_rule_keys, finite_or_none, format_selector, parse_selector
from .values import BadValueError

OVERRIDES = "quotas/"
"""Where the overrides are in the state; the rest of a record's key is the rule's selector."""

PAUSES = "pauses/"
"""Where the pauses are in the state; the rest of a record's key is the pause's name."""

CHANGES_SCHEMA = 1
"""Version of what is written there."""

MAX_PAUSES = 100
"""Each is compared with each client when rules are looked up."""


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
    """False when a rule of a stronger source has the same keys, and outside of its schedule."""
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
    """In order of precedence; one not in force follows the one that beat it."""
    budgets: tuple[RuleEntry, ...]
    """Those of the file, each with the rates that an override gives it."""
    in_force: Mapping[str, RuleEntry]
    """By the selectors of their rules and budgets."""
    settings: QuotaManagerSettings
    """With the rules in force."""
    table: RuleTable
    """Of the rules in force."""
    of_file: ScheduledSettings
    """What of the file is in force at the time."""


def compose_rules(
    settings: QuotaManagerSettings,
    kafka: Iterable[Rule],
    kept: Mapping[str, KeptChange],
    at_s: float,
) -> ComposedRules:
    """Return the rules in force at a time, and those that they beat.

    `settings` has the rules of the file, `kept` overrides and pauses by the keys of their records.
    """
    overrides = [each for _, each in sorted(kept.items()) if isinstance(each, RuleEntry)]
    budgets = _budget_entries(settings, overrides)
    overridden = {
        name: each.rule
        for name, each in budgets.items()
        if each.source is RuleOrigin.OVERRIDE and isinstance(each.rule, Budget)
    }
    now = ScheduledSettings.at(settings, at_s, overridden)
    rules_now = now.settings.rules
    of_file = {rule.selector: RuleEntry(rule, RuleOrigin.FILE) for rule in rules_now}
    of_kafka = (RuleEntry(rule, RuleOrigin.KAFKA) for rule in kafka)
    of_rules = (each for each in overrides if not isinstance(each.rule, Budget))
    by_name: dict[str, list[RuleEntry]] = {}
    for number, entry in enumerate(chain(of_rules, of_kafka), len(settings.rules)):
        name = entry.rule.selector
        by_name.setdefault(name, []).append(_in_place_of(of_file.get(name), entry, number))
    for name, entry in of_file.items():
        by_name.setdefault(name, []).append(entry)
    numbers = {rule.number for rule in rules_now}
    for rule in settings.rules:
        if rule.number not in numbers:
            entry = RuleEntry(rule, RuleOrigin.FILE, in_force=False)
            by_name.setdefault(rule.selector, []).append(entry)
    in_order = sorted(by_name.items(), key=lambda item: (item[1][0].rule.order, item[0]))
    in_force = {name: same[0] for name, same in in_order if same[0].in_force}
    entries = tuple(
        entry if entry is same[0] else replace(entry, in_force=False)
        for _, same in in_order
        for entry in same
    )
    rules = tuple(entry.rule for entry in in_force.values())
    table = RuleTable(rules, enforce=settings.enforce, pauses=_pauses_of(kept))
    of_budgets = tuple(
        replace(each, in_force=now.scheduled.get(each.rule.title, True))
        for each in budgets.values()
    )
    named = {each.rule.selector: each for each in of_budgets}
    settings = replace(settings, rules=rules)
    return ComposedRules(entries, of_budgets, {**in_force, **named}, settings, table, now)


def _budget_entries(
    settings: QuotaManagerSettings, overrides: Iterable[RuleEntry]
) -> dict[str, RuleEntry]:
    """Return the budgets of the file by their names, or the overrides in their place."""
    of_file = budgets_of(settings.rules)
    entries = {name: RuleEntry(each, RuleOrigin.FILE) for name, each in of_file.items()}
    for entry in overrides:
        if isinstance(entry.rule, Budget) and entry.rule.name in of_file:
            beaten = of_file[entry.rule.name]
            enforce = beaten.enforce if entry.enforce is None else entry.enforce
            bounds, place = entry.rule.bounds, entry.rule.place
            rule = replace(beaten, bounds=bounds, enforce=enforce, place=place, when=None)
            entries[beaten.name] = replace(entry, rule=rule)
    return entries


def _pauses_of(kept: Mapping[str, KeptChange]) -> list[QuotaPause]:
    """Return the pauses in the order of their making."""
    return [each for each in kept.values() if isinstance(each, QuotaPause)]


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
        share=beaten.share.below(rule.bounds) if beaten.share else None,
        adaptive=beaten.adaptive if can_adapt else None,
        expected=beaten.expected,
        enforce=beaten.enforce if entry.enforce is None else enforce,
    )
    return replace(entry, rule=rule)


def make_override(
    keys: Mapping[str, str],
    bounds: Mapping[QuotaKind, float],
    scope: Any = "each",
    by: object = None,
    at_s: object = None,
    *,
    enforce: object = None,
    until_s: object = None,
) -> RuleEntry:
    """Make the entry of an override from what an operator or the state says; check all of it.

    Raises ValueError when these make no rule.
    """
    check_rule_keys(keys)
    by, made_s = _origin(by, at_s)
    end_s = _time(until_s, "ends")
    if not (enforce is None or isinstance(enforce, bool)):
        raise ValueError(f"whether it is enforced is {enforce!r}, not true or false")
    place = f"override by {by}" if by else "override"
    if BUDGET_KEY in keys:
        rule: Rule = Budget(name=keys[BUDGET_KEY], bounds=bounds, place=place)
    else:
        names: Any = {key.replace("-", "_"): value for key, value in keys.items()}
        rule = Rule(**names, scope=scope, bounds=bounds, place=place)
    return RuleEntry(rule, RuleOrigin.OVERRIDE, by, made_s, enforce=enforce, until_s=end_s)


def kept_change_record(change: KeptChange) -> Record:
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
    return Record.of(OVERRIDES + change.rule.selector, value, CHANGES_SCHEMA)


def read_changes(store: Store) -> dict[str, KeptChange]:
    """Return a store's changes by their records' keys. Raises StateError for one that is bad."""
    return {
        **{record.key: _read(record, "override", _override) for record in store.items(OVERRIDES)},
        **{record.key: _read(record, "pause", _pause) for record in store.items(PAUSES)},
    }


def _read(record: Record, what: str, change_of: Callable[[str, Json], KeptChange]) -> KeptChange:
    try:
        record.check_schema(CHANGES_SCHEMA)
        change = change_of(record.key.partition("/")[2], record.value)
        if kept_change_record(change).key != record.key:
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
    time_s = finite_or_none(value)
    if time_s is None and value is not None:
        raise ValueError(f"when it {what} is {value!r}, not a time")
    return time_s


Compose = Callable[[], ComposedRules]

Result = TypeVar("Result")


async def _here(work: Callable[[], Result]) -> Result:
    return work()


class RuleRegistry:
    """All rules by source; it alone gives the manager its rules.

    A rule replaces one with the same keys in a weaker source, with all its bounds, until it goes.
    Only whether the bound is adaptive and enforced, and whether clients are expected to be at it,
    is left to the file, unless an override says whether it is enforced.

    The manager gets the rules at once, with the overrides of the store, and after each change. To
    compose 10,000 takes some 0.2 s: `elsewhere` may do it in another thread, and the rules before
    stay in force meanwhile. So may `writing` write, one change after the other, for as long as the
    cluster takes. Changes may overlap: when one returns, it is in force with all that were called
    before it, and none that was called later is undone.

    Call `end_due` at the start, and every second: by its time schedules go, at first by `now_s`.

    Of several processes that share the store one writes; the others, with `writes` False, `reread`
    when it has. One that is to write from now on gets `writes` and rereads: what ended in the one
    before may still be in the store. What ended in another by its clock, which was ahead, is in
    force again once that is right, for as long as it is in the store.

    Raises StateError when the store, or an override in it, cannot be read.
    """

    composed: ComposedRules
    """What the sources come to now."""

    def __init__(
        self,
        manager: QuotaManager,
        store: Store,
        settings: QuotaManagerSettings,
        elsewhere: Callable[[Compose], Awaitable[ComposedRules]] = _here,
        writing: Callable[[Callable[[], None]], Awaitable[None]] = _here,
        *,
        writes: bool = True,
        now_s: float = 0.0,
    ) -> None:
        self.writes = writes
        self._now_s = now_s
        self._writing = writing
        self._manager = manager
        self._store = store
        self._elsewhere = elsewhere
        self._settings = settings
        self._kafka: tuple[Rule, ...] = ()
        self._kept: Mapping[str, KeptChange] = read_changes(store)
        """Overrides and pauses by the keys of their records."""
        self._stored = self._kept
        """What is in the store, if another process writes."""
        self._changes = self._latest = 0
        self._put_in_force(self._compose())

    async def put(self, override: RuleEntry) -> RuleEntry:
        """Make an override, in the place of one with the same keys, and keep it; return its entry.

        Raises BadValueError for one of a budget that there is not, or that guarantees more, and
        StateError when it was not kept, nor is in force.
        """
        if isinstance(override.rule, Budget):
            self._check_budget(override.rule)
        composed = await self._change({kept_change_record(override).key: override})
        return composed.in_force[override.rule.selector]

    def _check_budget(self, override: Budget) -> None:
        names = list(budgets_of(self._settings.rules))
        if override.name not in names:
            fix = f"write {' or '.join(names)}" if names else "add it to quotas.budgets"
            raise BadValueError(f"no rule's clients are in a budget {override.name!r}", fix)
        in_force = self.composed.table.budgets
        guaranteed = next((of for each, of in in_force if each.name == override.name), 0.0)
        for kind, rate in override.bounds.items():
            if rate < guaranteed:
                most, own = kind.unit.format(rate), kind.unit.format(guaranteed)
                text = f"{kind}: {most} is less than its clients are guaranteed, {own} in all"
                raise BadValueError(text, f"write {own} or more, or guarantee less in the file")

    async def delete(self, keys: Mapping[str, str]) -> bool:
        """Delete an override; return whether one had exactly these keys. Raises as `put`."""
        return bool(await self._end([OVERRIDES + format_selector(keys)]))

    def pauses(self) -> list[QuotaPause]:
        """Return the pauses in force, that of all clients first."""
        return sorted(_pauses_of(self._kept), key=lambda pause: (bool(pause.keys), pause.name))

    async def pause(self, pause: QuotaPause) -> None:
        """Enforce no quota of these clients until a time, in the place of a pause with these keys.

        Raises ValueError for other keys than a rule's or too many pauses, and StateError as `put`.
        """
        is_new = PAUSES + pause.name not in self._kept
        if is_new and len(_pauses_of(self._kept)) >= MAX_PAUSES:
            raise ValueError(f"there are {MAX_PAUSES} pauses already, and no more are kept")
        await self._change({kept_change_record(pause).key: pause})

    async def resume(self, keys: Mapping[str, str] | None = None) -> list[QuotaPause]:
        """End the pause with these keys, or every one; return those in force. Raises as `pause`."""
        pauses = _pauses_of(self._kept)
        names = [each.name for each in pauses] if keys is None else [quota_pause_name(keys)]
        ended = await self._end([PAUSES + name for name in names])
        return [each for each in ended if isinstance(each, QuotaPause)]

    async def end_due(self, now_s: float) -> list[KeptChange]:
        """End overrides and pauses whose time has come, in seconds of the Unix epoch; return them.

        What begins or ends by its schedule does so, too. Raises StateError when overrides or pauses
        could not be deleted; they have ended all the same.
        """
        self._now_s, of_file, before = now_s, self.composed.of_file, self._kept
        self._kept = self._not_ended(before if self.writes else self._stored)
        due = {key: each for key, each in before.items() if key not in self._kept}
        if self._kept != before or not of_file.since_s <= now_s < of_file.until_s:
            await self._use()
        if self.writes and due:  # but for what was set again meanwhile
            gone = (key for key in due if key not in self._kept)
            await self._writing(lambda: self._store.put_many((), delete=gone))
        return list(due.values())

    async def reread(self) -> None:
        """Put in force what another process wrote. Raises StateError; all is as before then."""
        self._stored = read_changes(self._store)
        kept = self._stored if self.writes else self._not_ended(self._stored)
        if kept != self._kept:
            self._kept = kept
            await self._use()

    async def use_file(self, settings: QuotaManagerSettings) -> None:
        """Put in force the configuration's settings and rules."""
        self._settings = settings
        await self._use()

    async def use_store(self, store: Store) -> None:
        """Keep all in another store, in the place of what that has. Raises StateError."""
        if self.writes:
            gone = [each.key for each in (*store.items(OVERRIDES), *store.items(PAUSES))]
            records = [kept_change_record(change) for change in self._kept.values()]
            await self._writing(partial(store.put_many, records, delete=gone))
        self._store = store

    async def use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put in force the cluster's rules, in the place of those that it had before."""
        rules = tuple(rules)
        if rules != self._kafka:
            self._kafka = rules
            await self._use()

    async def _end(self, keys: Iterable[str]) -> list[KeptChange]:
        """Delete those of these records that there are; return what is in force no longer."""
        ended = {key: self._kept[key] for key in keys if key in self._kept}
        if ended:
            await self._change({}, gone=ended)
        return list(ended.values())

    async def _change(
        self, made: Mapping[str, KeptChange], gone: Collection[str] = ()
    ) -> ComposedRules:
        """Write what is made and what is gone, then put in force what is kept by then.

        Raises StateError, also when this is not the one that writes.
        """
        if not self.writes:
            what = "overrides and pauses are kept by another member of this proxy"
            raise StateError(what, "send the request again in a second")
        records = [kept_change_record(change) for change in made.values()]
        try:
            await self._writing(partial(self._store.put_many, records, delete=tuple(gone)))
        except StateError:
            raise
        except BaseException:  # such as a cancelled request: it is written all the same
            self._keep(made, gone)
            self._use_at_once()
            raise
        self._keep(made, gone)
        return await self._use()

    def _keep(self, made: Mapping[str, KeptChange], gone: Collection[str]) -> None:
        """Have other changes; those before stay as they are for what is being composed of them."""
        kept = self._kept.items()
        self._kept = {**{key: each for key, each in kept if key not in gone}, **made}

    def _not_ended(self, kept: Mapping[str, KeptChange]) -> dict[str, KeptChange]:
        dated = ((key, each, each.until_s) for key, each in kept.items())
        return {key: each for key, each, end in dated if end is None or end > self._now_s}

    @property
    def _compose(self) -> Compose:
        """Composes the sources as they are now."""
        return partial(compose_rules, self._settings, self._kafka, self._kept, self._now_s)

    async def _use(self) -> ComposedRules:
        """Put the sources in force as they are now, unless later ones are by then."""
        self._changes += 1
        change = self._changes
        try:
            composed = await self._elsewhere(self._compose)
        except BaseException:  # as above: what is kept must be in force
            self._use_at_once()
            raise
        if change > self._latest:
            self._latest = change
            self._put_in_force(composed)
        return composed

    def _use_at_once(self) -> None:
        """Put the sources in force here and now; what is being composed is of earlier ones."""
        self._latest = self._changes
        self._put_in_force(self._compose())

    def _put_in_force(self, composed: ComposedRules) -> None:
        self.composed = composed
        self._manager.update(composed.settings, composed.table)
