"""Load is evened out in real rounds, with loads as members measure and announce them."""

import math
from collections import Counter
from random import Random

import pytest
from simulated_group import Group

from proxy.quota.entities import ClientIdentity
from proxy.tier.slot_balance import SlotLoad, place_slots
from proxy.tier.slot_loads import LoadMeter
from proxy.tier.slot_map import SLOTS

MEAN_LOAD = 0.4
"""Of one member's capacity."""

LOOK_S, AVERAGE_S = 30.0, 20.0
NOISE = 0.1
HOURS_4 = int(4 * 3600 / LOOK_S)
ENOUGH_ROUNDS = 20
FEW_ROUNDS = 5
MAX_OF_MEAN = 1.2
MAX_OF_LEAST_MOVES = 1.1
SEEDS = range(3)


def no_slot(_: ClientIdentity) -> int:
    raise AssertionError("nobody moves anything: loads are what the test says")


class Tier:
    """Members, their clients' loads, and a clock that is moved on."""

    def __init__(self, members: int, seed: int = 0, heaviest: float = 0.5) -> None:
        self.random = Random(seed)
        self.group = Group(place_slots, SLOTS)
        self.now_s = 0.0
        self.rounds = self.handovers = 0
        self.meters: dict[str, LoadMeter] = {}
        self.owners: dict[int, str] = {}
        self.since_s: dict[int, float] = {}
        weights = [min(self.random.paretovariate(1.5), 50.0) for _ in range(SLOTS)]
        scale = MEAN_LOAD * members / sum(weights)
        self.loads = [min(weight * scale, heaviest * MEAN_LOAD) for weight in weights]
        for number in range(members):
            self.join(f"m{number}")
        self.settle()

    def join(self, name: str) -> None:
        self.group.join(name)
        self.meters[name] = LoadMeter()

    def settle(self, most: int = ENOUGH_ROUNDS) -> None:
        """Hold rounds until none is wanted, each led by another member."""
        for _ in range(most):
            for name in self.group.processes:
                self.group.release(name)
            if not self.group.wants_round:
                return
            self.rounds += 1
            self.group.round(set(), set(), self.rounds)
            self.group.check()
            for name, process in self.group.processes.items():
                for slot in process.slots.owned:
                    if self.owners.get(slot) != name:
                        self.handovers += slot in self.owners
                        self.owners[slot], self.since_s[slot] = name, self.now_s

    def look(self) -> None:
        """Have each member measure its slots, and announce them if that is news."""
        self.now_s += LOOK_S
        for name, process in self.group.processes.items():
            own, newest = process.slots.owned, process.slots.assignment
            meter, known = self.meters[name], {} if newest is None else newest.loads
            for _ in meter.measuring({}, {}, no_slot, self.now_s, 0.0):
                pass
            meter.loads = {slot: SlotLoad(0.0, self.measured(slot)) for slot in own}
            if meter.announce(own, known):
                process.wants_round = True
            process.said = process.announcing(meter.announced)

    def measured(self, slot: int) -> float:
        risen = 1 - math.exp((self.since_s[slot] - self.now_s) / AVERAGE_S)
        return self.loads[slot] * risen * self.random.uniform(1 - NOISE, 1 + NOISE)

    def work(self, looks: int) -> int:
        """Go on for so many looks; return how many slots were handed over meanwhile."""
        before = self.handovers
        for _ in range(looks):
            self.look()
            self.settle()
        return self.handovers - before

    def most_of_mean(self) -> float:
        carried = Counter[str]()
        for slot, owner in self.owners.items():
            carried[owner] += self.loads[slot]
        return max(carried.values()) * len(self.group.processes) / sum(self.loads)

    def counts(self) -> Counter[str]:
        return Counter(self.owners.values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("members", [2, 3, 5, 8])
def test_load_is_even_within_few_rounds_and_then_rests(members: int, seed: int) -> None:
    tier = Tier(members, seed)
    while not any(meter.announced for meter in tier.meters.values()):
        tier.look()
    tier.settle(FEW_ROUNDS)
    assert tier.most_of_mean() <= MAX_OF_MEAN
    tier.work(HOURS_4 // 8)
    assert tier.work(HOURS_4) == 0
    assert tier.most_of_mean() <= MAX_OF_MEAN


@pytest.mark.parametrize("seed", SEEDS)
def test_load_that_moves_to_other_slots_is_even_again_within_few_rounds(seed: int) -> None:
    tier = Tier(5, seed)
    tier.work(HOURS_4 // 8)
    quiet = {slot for slot, owner in tier.owners.items() if owner in ("m0", "m1")}
    tier.loads = [load / 10 if slot in quiet else load for slot, load in enumerate(tier.loads)]
    tier.look()
    tier.settle(FEW_ROUNDS)
    assert tier.most_of_mean() <= MAX_OF_MEAN
    tier.work(HOURS_4 // 8)
    assert tier.work(HOURS_4) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("heavy", [1.1, 2.0])
def test_a_heavy_key_keeps_its_place(heavy: float, seed: int) -> None:
    tier = Tier(3, seed)
    tier.loads[seed] = heavy * MEAN_LOAD
    tier.work(HOURS_4 // 8)
    owner = tier.owners[seed]
    assert tier.work(HOURS_4) == 0
    alone = sum(tier.loads[slot] for slot, name in tier.owners.items() if name == owner)
    assert alone <= max(MAX_OF_MEAN * tier.loads[seed], MAX_OF_MEAN * sum(tier.loads) / 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("members", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_who_joins_gets_its_part_by_few_moves(members: int, is_loaded: bool, seed: int) -> None:
    tier = Tier(members, seed)
    if is_loaded:
        tier.work(HOURS_4 // 8)
    before, rounds = tier.handovers, tier.rounds
    tier.join("new")
    tier.settle()
    moves, got = tier.handovers - before, tier.counts()["new"]
    assert 0 < moves <= MAX_OF_LEAST_MOVES * got
    assert tier.rounds - rounds <= FEW_ROUNDS
    if is_loaded:
        assert tier.most_of_mean() <= MAX_OF_MEAN
        assert tier.work(HOURS_4) == 0
    else:
        assert got == pytest.approx(SLOTS / (members + 1), rel=0.1)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_restarts_has_its_slots_again(seed: int) -> None:
    tier = Tier(3, seed)
    tier.work(HOURS_4 // 8)
    before = dict(tier.owners)
    tier.join("m1")
    tier.work(HOURS_4)
    assert tier.owners == before
