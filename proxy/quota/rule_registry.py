"""Keep the rules in force: of the file, the cluster, and what operators change at run time."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from proxy.state import Record, StateError, Store

from .entities import QuotaKind
from .kept_changes import OVERRIDES, make_override, override_record, read_overrides, read_pauses
from .manager import QuotaManager
from .pauses import PAUSES, QuotaPause, pause_name
from .rule_sources import ComposedRules, RuleEntry, RuleSources, compose
from .rules import QuotaSettings, Rule
from .selector import selector

MAX_PAUSES = 100
"""Each is compared with each client when rules are looked up."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What has ended by itself."""

    overrides: tuple[RuleEntry, ...] = ()
    pauses: tuple[QuotaPause, ...] = ()


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

    Where several processes share the store one of them writes; the others, with `writes` False,
    `reread` when it has. What ends by itself ends in all of them. One that is to write from now on
    gets `writes` and rereads: what ended in the one before may still be in the store.

    Raises StateError when the store, or an override in it, cannot be read.
    """

    def __init__(
        self,
        manager: QuotaManager,
        store: Store,
        settings: QuotaSettings,
        elsewhere: Callable[[Compose], Awaitable[ComposedRules]] = _here,
        *,
        writes: bool = True,
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self.writes = writes
        self.on_written = on_written
        """Called when overrides or pauses in the store have changed."""
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
        entry = make_override(keys, bounds, scope, by, at_s, enforce=enforce, until_s=until_s)
        self._write([override_record(entry)])
        composed = await self._use(overrides={**self._sources.overrides, name: entry})
        return composed.in_force[name]

    async def delete(self, keys: Mapping[str, str]) -> bool:
        """Delete an override; return whether one had exactly these keys. Raises as `put`."""
        name = selector(keys)
        overrides = dict(self._sources.overrides)
        if overrides.pop(name, None) is None:
            return False
        self._write(delete=[OVERRIDES + name])
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
        self._write([pause.record()])
        await self._use(pauses={**pauses, name: pause})

    async def resume(self, keys: Mapping[str, str] | None = None) -> list[QuotaPause]:
        """End the pause with these keys, or with None every one; return those that were in force.

        Raises as `pause`.
        """
        pauses = dict(self._sources.pauses)
        names = [*pauses] if keys is None else [pause_name(keys)]
        ended = [pauses.pop(name) for name in names if name in pauses]
        if ended:
            self._write(delete=[PAUSES + pause.name for pause in ended])
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
        gone = [OVERRIDES + name for name in names if name not in self._sources.overrides]
        names = (pause.name for pause in ended.pauses)
        gone += [PAUSES + name for name in names if name not in self._sources.pauses]
        if self.writes and gone:  # but for what was set again meanwhile
            self._write(delete=gone)
        return ended

    async def reread(self) -> None:
        """Put in force the overrides and pauses that the store has now; another process wrote them.

        Raises StateError; the rules are as before then.
        """
        overrides, pauses = read_overrides(self._store), read_pauses(self._store)
        if (overrides, pauses) != (self._sources.overrides, self._sources.pauses):
            await self._use(overrides=overrides, pauses=pauses)

    async def use_file(self, settings: QuotaSettings) -> None:
        """Put in force the configuration's settings and rules."""
        await self._use(settings=settings)

    def use_store(self, store: Store) -> None:
        """Keep overrides and pauses in another store from now on, in the place of those in it.

        One that does not write only reads there from now on. Raises StateError.
        """
        if not self.writes:
            self._store = store
            return
        records = [override_record(entry) for entry in self._sources.overrides.values()]
        records += [pause.record() for pause in self._sources.pauses.values()]
        others = (*store.items(OVERRIDES), *store.items(PAUSES))
        store.put_many(records, delete=[record.key for record in others])
        self._store = store
        self.on_written()

    async def use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put in force the cluster's rules, in the place of those that it had before."""
        rules = tuple(rules)
        if rules != self._sources.kafka:
            await self._use(kafka=rules)

    def _write(self, records: Iterable[Record] = (), *, delete: Iterable[str] = ()) -> None:
        """Write to the store. Raises StateError, also when this is not the one that writes."""
        if not self.writes:
            what = "overrides and pauses are kept by another worker of this proxy"
            raise StateError(what, "send the request to the proxy's admin port")
        self._store.put_many(records, delete=delete)
        self.on_written()

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
