"""Who owns which slots of a machine: evenly, then by load; and what is shown of that."""

from collections import Counter
from dataclasses import dataclass

import structlog
from prometheus_client import CollectorRegistry

from metrics import MemberInstruments
from proxy.tier.slot_balance import MOVES_PER_ROUND
from proxy.tier.slots import SLOTS
from proxy.tier.announced_loads import LEAST_MEASURED_S
from proxy.workers.slot_placement import SlotPlacement
from proxy.workers.slot_shares import share_slots

NAMES = ["0", "1"]
MOST_MOVES = SLOTS * MOVES_PER_ROUND


@dataclass
class Holder:
    name: str
    serves: bool = True


class World:
    """The slots of a machine, and what is known of its workers."""

    def __init__(self) -> None:
        self.places = [Holder(name) for name in NAMES]
        self.looping: list[str] = []
        self.registry = CollectorRegistry()
        metrics = MemberInstruments(self.registry)
        self.slots = SlotPlacement(self.places, lambda: self.looping, metrics)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kafka_quota_proxy_{name}", labels)

    def tell(self, loads: dict[int, float], measured_s: float = LEAST_MEASURED_S) -> None:
        """Have each worker say what its slots take; of CPU time."""
        owners = self.slots.owners()
        for name in NAMES:
            rows = [[s, 1000, cpu, [f"c{s}"]] for s, cpu in loads.items() if owners[s] == name]
            self.slots.take_loads(name, measured_s, rows)

    def change(self) -> Counter[str]:
        self.slots.handed_over(self.slots.owners())
        return Counter(self.slots.owners())


def uneven(share: float = 0.08) -> dict[int, float]:
    """Ten slots of the first worker with some load."""
    return dict.fromkeys(range(0, 20, 2), share)


def test_it_begins_evenly():
    world = World()
    assert world.slots.owners() == share_slots(NAMES)
    assert world.value("slots_owned", member="0") == SLOTS / 2
    assert world.value("slot_moves_total") == 0
    assert not world.slots.balance()


def test_load_is_evened_out_and_then_rests():
    world = World()
    world.tell(uneven())
    assert world.slots.balance()
    moved = [s for s, name in enumerate(world.slots.owners()) if name != share_slots(NAMES)[s]]
    assert 0 < len(moved) <= MOST_MOVES
    assert world.value("slot_moves_total") == 0  # not before all follow
    world.change()
    assert world.value("slot_moves_total") == len(moved)
    assert world.value("slots_owned", member="1") == SLOTS / 2 + len(moved)
    world.tell(uneven())
    world.slots.balance()
    world.change()
    world.tell(uneven())
    assert not world.slots.balance()
    carried = world.slots.documents()
    assert abs(carried["0"]["cpu_share"] - carried["1"]["cpu_share"]) < 0.2


def test_nothing_moves_before_all_have_measured_long_enough():
    world = World()
    world.tell(uneven(), LEAST_MEASURED_S - 1)
    assert not world.slots.balance()
    world.tell(uneven())
    world.places[1].serves = False
    assert not world.slots.balance()  # there is nobody to move to
    world.places[1].serves = True
    assert not world.slots.balance()  # the new one has measured nothing yet


def test_what_was_moved_stays_through_a_crash_and_comes_back_after_a_crash_loop():
    world = World()
    world.tell(uneven())
    world.slots.balance()
    balanced = world.slots.owners()
    world.places[1].serves = False
    assert world.slots.owners() == balanced
    world.looping = ["1"]
    assert set(world.slots.owners()) == {"0"}
    world.looping = []
    assert world.slots.owners() == balanced


def test_an_overloaded_slot_is_shown_and_logged_once():
    world = World()
    world.tell({4: 0.9, 5: 0.1})
    assert world.value("slots_overloaded") == 1
    shown = world.slots.documents()
    assert shown["1"] == {"owned": 128, "bytes_per_s": 1000, "cpu_share": 0.1, "overloaded": []}
    (slot,) = shown["0"]["overloaded"]
    assert slot == {"slot": 4, "bytes_per_s": 1000, "cpu_share": 0.9, "clients": ["c4"]}
    with structlog.testing.capture_logs() as lines:
        for at_s in (0.0, 30.0, 60.0):
            world.slots.warn(at_s)
    (line,) = lines
    assert (line["slot"], line["worker"], line["clients"]) == (4, "0", ["c4"])
    assert line["log_level"] == "warning"
    world.tell({4: 0.1})
    assert world.value("slots_overloaded") == 0
