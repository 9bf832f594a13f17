"""Keep the rules in force: of the file, the cluster, and what operators change at run time."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from proxy.state import StateError, Store

from .entities import QuotaKind
from .manager import QuotaManager
from .rule_sources import (
    OVERRIDES,
    PAUSES,
    ComposedRules,
    KeptChange,
    RuleEntry,
    RuleSources,
    change_record,
    make_override,
    read_changes,
)
from .rules import QuotaPause, QuotaSettings, Rule, pause_name
from .selector import selector

MAX_PAUSES = 100
"""Each is compared with each client when rules are looked up."""


class Ended(NamedTuple):
    """What has ended by itself."""

    overrides: tuple[RuleEntry, ...] = ()
    pauses: tuple[QuotaPause, ...] = ()


Compose = Callable[[], ComposedRules]

RulesWrite = Callable[[], int]  # takes as long as the cluster does


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
    stay in force meanwhile. So may `writing` write, one change after the other. Changes may
    overlap: when one returns, it is in force with all that were called before it, and none that was
    called later is undone.

    Call `end_due` at the start, and every second.

    Of several processes that share the store one writes; the others, with `writes` False, `reread`
    when it has. One that is to write from now on gets `writes` and rereads: what ended in the one
    before may still be in the store.

    Raises StateError when the store, or an override in it, cannot be read.
    """

    def __init__(
        self,
        manager: QuotaManager,
        store: Store,
        settings: QuotaSettings,
        elsewhere: Callable[[Compose], Awaitable[ComposedRules]] = _here,
        writing: Callable[[RulesWrite], Awaitable[int]] = _here,
        *,
        writes: bool = True,
    ) -> None:
        self.writes = writes
        self._writing = writing
        self._manager = manager
        self._store = store
        self._elsewhere = elsewhere
        self._sources = RuleSources(settings, (), read_changes(store))
        self._changes = self._latest = 0
        self._put_in_force(self._sources.compose())

    def entries(self) -> list[RuleEntry]:
        """Return all rules by precedence; one not in force follows the one that beat it."""
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

        Raises ValueError when these make no rule, and StateError when it was not kept, nor is in
        force.
        """
        name = selector(keys)
        entry = make_override(keys, bounds, scope, by, at_s, enforce=enforce, until_s=until_s)
        return (await self._change({change_record(entry).key: entry})).in_force[name]

    async def delete(self, keys: Mapping[str, str]) -> bool:
        """Delete an override; return whether one had exactly these keys. Raises as `put`."""
        return bool(await self._end([OVERRIDES + selector(keys)]))

    @property
    def is_enforced(self) -> bool:
        """Whether the configuration lets rules be enforced at all."""
        return self._sources.settings.enforce

    def pauses(self) -> list[QuotaPause]:
        """Return the pauses in force, that of all clients first."""
        return sorted(self._sources.pauses, key=lambda pause: (bool(pause.keys), pause.name))

    async def pause(self, pause: QuotaPause) -> None:
        """Enforce no quota of these clients until a time, in the place of a pause with these keys.

        Raises ValueError for other keys than a rule's or too many pauses, and StateError as `put`.
        """
        is_new = PAUSES + pause.name not in self._sources.kept
        if is_new and len(self._sources.pauses) >= MAX_PAUSES:
            raise ValueError(f"there are {MAX_PAUSES} pauses already, and no more are kept")
        await self._change({change_record(pause).key: pause})

    async def resume(self, keys: Mapping[str, str] | None = None) -> list[QuotaPause]:
        """End the pause with these keys, or every one; return those in force. Raises as `pause`."""
        pauses = self._sources.pauses
        names = [each.name for each in pauses] if keys is None else [pause_name(keys)]
        ended = await self._end([PAUSES + name for name in names])
        return [each for each in ended if isinstance(each, QuotaPause)]

    async def end_due(self, now_s: float) -> Ended:
        """End overrides and pauses whose time has come, in seconds of the Unix epoch.

        Raises StateError when they could not be deleted; they have ended all the same.
        """
        kept = self._sources.kept
        dated = ((key, each, each.until_s) for key, each in kept.items())
        due = {key: each for key, each, until in dated if until is not None and until <= now_s}
        if due:
            await self._use(kept=self._kept_with({}, due))
        if self.writes and due:  # but for what was set again meanwhile
            gone = (key for key in due if key not in self._sources.kept)
            await self._writing(lambda: self._store.put_many((), delete=gone))
        return Ended(
            tuple(each for each in due.values() if isinstance(each, RuleEntry)),
            tuple(each for each in due.values() if isinstance(each, QuotaPause)),
        )

    async def reread(self) -> None:
        """Put in force what another process wrote. Raises StateError; all is as before then."""
        kept = read_changes(self._store)
        if kept != self._sources.kept:
            await self._use(kept=kept)

    async def use_file(self, settings: QuotaSettings) -> None:
        """Put in force the configuration's settings and rules."""
        await self._use(settings=settings)

    async def use_store(self, store: Store) -> None:
        """Keep all in another store, in the place of what that has. Raises StateError."""
        if self.writes:
            gone = [each.key for each in (*store.items(OVERRIDES), *store.items(PAUSES))]
            records = [change_record(change) for change in self._sources.kept.values()]
            await self._writing(partial(store.put_many, records, delete=gone))
        self._store = store

    async def use_kafka(self, rules: Iterable[Rule]) -> None:
        """Put in force the cluster's rules, in the place of those that it had before."""
        rules = tuple(rules)
        if rules != self._sources.kafka:
            await self._use(kafka=rules)

    async def _end(self, keys: Iterable[str]) -> list[KeptChange]:
        """Delete those of these records that there are; return what is in force no longer."""
        kept = self._sources.kept
        ended = {key: kept[key] for key in keys if key in kept}
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
        records = [change_record(change) for change in made.values()]
        try:
            await self._writing(partial(self._store.put_many, records, delete=tuple(gone)))
        except StateError:
            raise
        except BaseException:  # such as a cancelled request: it is written all the same
            self._use_at_once(kept=self._kept_with(made, gone))
            raise
        return await self._use(kept=self._kept_with(made, gone))

    def _kept_with(
        self, made: Mapping[str, KeptChange], gone: Collection[str]
    ) -> dict[str, KeptChange]:
        kept = self._sources.kept.items()
        return {**{key: each for key, each in kept if key not in gone}, **made}

    async def _use(self, **changed: Any) -> ComposedRules:
        """Put other sources in force, unless later ones are by then."""
        self._sources = replace(self._sources, **changed)
        self._changes += 1
        change = self._changes
        try:
            composed = await self._elsewhere(self._sources.compose)
        except BaseException:  # as above: what is kept must be in force
            self._use_at_once()
            raise
        if change > self._latest:
            self._latest = change
            self._put_in_force(composed)
        return composed

    def _use_at_once(self, **changed: Any) -> None:
        """Put other sources in force here and now; what is being composed is of earlier ones."""
        self._sources = replace(self._sources, **changed)
        self._latest = self._changes
        self._put_in_force(self._sources.compose())

    def _put_in_force(self, composed: ComposedRules) -> None:
        self._composed = composed
        self._manager.update(composed.settings, composed.table)
