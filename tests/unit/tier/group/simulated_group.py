"""A group as Kafka's coordinator keeps it, with members that miss any step of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from parts.even_placement import even
from tier_machines import announcement

from proxy.tier.group.assignor import assign
from proxy.tier.group.group_documents import Assignment, Subscription
from proxy.tier.group.slot_states import RELEASING, SlotStates
from proxy.tier.slot_balance import Placement, SlotLoad

SLOTS = 12


@dataclass
class Process:
    """One process of a member."""

    said: Subscription
    slots: SlotStates
    is_alive: bool = True
    """Dead ones serve nothing; they may still be in the group."""
    in_group: bool = True
    wants_round: bool = True

    def announcing(self, loads: Mapping[int, SlotLoad]) -> Subscription:
        return replace(self.said, loads=loads)

    def take(self, assignment: Assignment) -> None:
        refused = any(each.name == self.said.name for each in assignment.refused.values())
        _, must_rejoin = self.slots.assign(assignment, self.said.name, is_refused=refused)
        reached = frozenset(assignment.slot_map.members)
        is_news = not reached <= self.said.reached  # a newcomer, which is tried at once
        self.said = replace(self.said, reached=reached)
        self.wants_round |= must_rejoin or is_news


@dataclass
class Group:
    """Static members by name. A member that does not rejoin stays, with what it said."""

    place: Placement = even
    slots: int = SLOTS
    generation: int = 0
    said: dict[str, Subscription] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    assignment: Assignment | None = None
    """Of this generation, when there is one."""
    is_changed: bool = False
    numbers: count = field(default_factory=count)

    def join(self, name: str) -> None:
        """Start a process; one of the same name that is in the group is fenced by it."""
        before = self.processes.get(name)
        if before is not None:
            before.is_alive = False
            before.slots.lost()
        said = announcement(name, slots=self.slots)
        self.processes[name] = new = Process(said, SlotStates(f"{name}#{next(self.numbers)}"))
        was_there = name in self.said
        self.said[name] = new.slots.subscription(said)
        if was_there and self.assignment is not None:
            new.wants_round = False
            new.take(self.assignment)  # Kafka begins no round for it
        else:
            self.is_changed = True

    def crash(self, name: str) -> None:
        self.processes[name].is_alive = False
        self.processes[name].slots.lost()

    def lose(self, name: str) -> None:
        """End a session by the member's own clock, which is before Kafka's: it joins again."""
        self.processes[name].slots.lost()
        self.processes[name].wants_round = True

    def expire(self, name: str) -> None:
        """End a session by Kafka's clock."""
        self.processes[name].slots.lost()
        self._remove(name)

    def leave(self, name: str) -> None:
        process = self.processes[name]
        process.slots.lost()
        process.is_alive = False
        self._remove(name)

    def _remove(self, name: str) -> None:
        if self.said.pop(name, None) is not None:
            self.is_changed = True
        self.processes[name].in_group = False

    def retire(self, name: str) -> None:
        """Have a process serve only until others have what it owns."""
        process = self.processes[name]
        process.said = replace(process.said, is_leaving=True)
        process.wants_round = True

    def release(self, name: str) -> None:
        process = self.processes[name]
        if process.is_alive and process.slots.of(RELEASING):
            process.slots.released(process.slots.of(RELEASING))
            process.wants_round = True

    def serve(self, name: str) -> None:
        self.processes[name].slots.serve(self.processes[name].slots.owned)

    def round(self, absent: set[str], deaf: set[str], leader: int, *, is_led: bool = True) -> None:
        """Hold a round: those absent do not rejoin, those deaf do not get their assignment."""
        here = sorted(n for n, p in self.processes.items() if p.is_alive and n not in absent)
        if not here:
            return
        self.is_changed = False
        for name in here:
            process = self.processes[name]
            process.in_group = True
            process.wants_round = False
            self.said[name] = process.slots.subscription(process.said)
        self.generation += 1
        self.assignment = None
        if not is_led:
            for name in here:
                self.processes[name].wants_round = True
            return
        chief = self.processes[here[leader % len(here)]]
        decided, is_another_round_wanted = assign(
            self.said, chief.slots.assignment, self.generation, self.place
        )
        self.assignment = Assignment.decode(decided.encode())
        for name in here:
            if name in deaf:
                self.processes[name].wants_round = True
            else:
                self.processes[name].take(self.assignment)
        if is_another_round_wanted:
            chief.wants_round = True

    @property
    def wants_round(self) -> bool:
        return self.is_changed or any(
            process.is_alive and process.wants_round for process in self.processes.values()
        )

    def check(self) -> None:
        """Nobody has a slot that another one has."""
        owners: dict[int, str] = {}
        for name, process in self.processes.items():
            for slot in process.slots.owned:
                assert slot not in owners, (slot, name, owners[slot])
                owners[slot] = name
