"""Opens the state of a tier for a machine, and has it while the machine works."""

from collections.abc import Callable

from proxy.cluster.kafka_client import Bootstrap
from proxy.config import Config
from proxy.config.stores import StateHolder
from proxy.members.slots import SLOTS
from proxy.state import SlotStore, Store
from proxy.workers.tier_rules import TierRules
from proxy.workers.tier_store import COMMON_SLOT, WATCH, TierStore, slot_key


class TierState:
    """The store, by the keys that `rules` make; `on_common` gets what others write for all.

    `on_common` is called in a thread.
    """

    def __init__(
        self,
        config: Config,
        way: Bootstrap,
        rules: TierRules,
        on_common: Callable[[frozenset[str]], None],
    ) -> None:
        tier = config.tier
        assert tier is not None
        self._config, self._way, self._rules, self._on_common = config, way, rules, on_common
        self._tier, self._machine = tier.name, tier.machine
        self._opened: SlotStore | None = None
        self.is_successor = False
        """Whether the process before is to leave the group first."""

    @property
    def store(self) -> SlotStore:
        """The store, once it has been opened."""
        assert self._opened is not None
        return self._opened

    @property
    def is_open(self) -> bool:
        """Whether `store` has been opened."""
        return self._opened is not None

    def open(self, holder: StateHolder | None) -> Store:
        """See `SlotSharing.open_store`."""
        state, way = self._config.state, self._way
        store = SlotStore(
            way,
            state.topic,
            tier=self._tier,
            machine=self._machine,
            slots=SLOTS,
            common=COMMON_SLOT,
            slot_of_record=self._rules.records,
            timeout_s=self._config.limits.connect_timeout,
        )
        try:
            if holder is not None:
                holder.release(store)
                self.is_successor = True
            self._rules.read(store)
            store.follow_common(self._on_common)
        except BaseException:
            store.close()
            raise
        self._opened = store
        return TierStore(store, self._rules.records)

    def watch_key(self) -> str | None:
        """See `SlotSharing.watch_key`."""
        taken = () if self._opened is None else self._opened.taken
        return slot_key(WATCH, min(taken)) if taken else None
