"""Clients of a budget on virtual time, wired as the relay does it, against water filling."""

import heapq
from itertools import product

import pytest
from closed_loop import CONSUMER, MB, PRODUCER, Announcer, ClosedLoop, Consumer, Producer
from parts.quota_world import QuotaWorld

from proxy.quota.entities import ClientIdentity
from proxy.quota.gate import FetchSizes
from proxy.quota.rules import Budget, QuotaManagerSettings, QuotaPause, Rule, RuleTable, Share
from proxy.quota.shares import Claim, divide_fairly

RATE = 200 * MB
ASKED_BYTES = 50 * MB
BEGIN_MS, END_MS = 4_000.0, 14_000.0
KINDS = (CONSUMER, PRODUCER)
TURN_MS = 0.5
SETTLED = {"rel": 0.05}

ANALYTICS = Budget(name="analytics", bounds=dict.fromkeys(KINDS, RATE))
ADHOC = Budget(name="adhoc", bounds={}, share=Share(ANALYTICS))


def rule(name, weight=1.0, guaranteed=0.0, ceiling=None, budget=ANALYTICS, **more):
    bounds = {} if ceiling is None else dict.fromkeys(KINDS, ceiling * MB)
    share = Share(budget, weight, guaranteed * MB)
    return Rule(client_id=name, bounds=bounds, share=share, **more)


def etl(**more):
    return rule("etl", 3, 60, 150, **more)


class Sized(Consumer):
    """A connection whose answers have one size, or less where the proxy asks for less."""

    size = 0

    def answered(self, size, expected):
        super().answered(min(size, self.size), expected)


class NewEachTime(Sized):
    """One that is made anew for each request."""

    def answered(self, size, expected):
        super().answered(size, expected)
        self.sizes = FetchSizes()


class Costly(Sized):
    """One whose turns take the proxy's time."""

    def _try(self):
        was_waiting = self._waits
        super()._try()
        if was_waiting and not self._waits:
            self.world.now_ms += TURN_MS


class LateLoop(ClosedLoop):
    """One in which what takes time makes all else late."""

    def run(self, end_ms):
        while self._events and self.now_ms <= end_ms:
            at_ms, _, action = heapq.heappop(self._events)
            self.now_ms = max(self.now_ms, at_ms)
            action()


class World:
    """The clients of some rules, each with a rule of its own name."""

    def __init__(self, *rules, **settings):
        self.quotas = QuotaWorld(*rules, **settings).quotas
        self.loop = ClosedLoop(self.quotas)
        self.connections = {}

    def reads(
        self,
        name,
        connections=4,
        size=500_000,
        from_ms=0.0,
        until_ms=float("inf"),
        *,
        kind=Sized,
        batch_bytes=1,
    ):
        client = self.quotas.client(ClientIdentity("l", None, name))
        for _ in range(connections):
            number = sum(map(len, self.connections.values()))
            made = kind(self.loop, number, ASKED_BYTES, client=client, ends_ms=until_ms)
            made.size, made.batch_bytes = size, batch_bytes
            self.connections.setdefault(name, []).append(made)
            self.loop.at(from_ms + 0.1 * number, made.ask)

    def writes(self, name, connections=4, size=500_000):
        client = self.quotas.client(ClientIdentity("l", None, name))
        for number in range(connections):
            made = Producer(self.loop, size, client=client, think_ms=0.2)
            self.connections.setdefault(name, []).append(made)
            self.loop.at(0.1 * number, made.ask)

    def writes_in_parts(self, name, connections, size):
        client = self.quotas.client(ClientIdentity("l", None, name))
        for number in range(connections):
            made = Announcer(self.loop, size, client=client)
            self.connections.setdefault(name, []).append(made)
            self.loop.at(0.1 * number, made.ask)

    def rate(self, name, begin_ms=BEGIN_MS, end_ms=END_MS):
        """MB per second that came in a time."""
        got = (each for made in self.connections[name] for each in made.got)
        size = sum(size for _, at_ms, size in got if begin_ms <= at_ms < end_ms)
        return size / (end_ms - begin_ms) * 1000 / MB

    def rates(self, begin_ms=BEGIN_MS, end_ms=END_MS):
        return {name: self.rate(name, begin_ms, end_ms) for name in self.connections}


@pytest.mark.parametrize(
    ("size", "connections"),
    [
        (50_000, (16, 16, 16)),  # a connection gets 23 MB/s at most: fewer get too little
        *product([500_000, 1_000_000, 2_000_000], [(16, 16, 16), (4, 16, 8), (16, 4, 8)]),
    ],
)
def test_clients_get_their_weights_share(size, connections):
    world = World(etl(), rule("n1"), rule("n2"))
    for name, count in zip(("etl", "n1", "n2"), connections, strict=True):
        world.reads(name, count, size)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"etl": 120, "n1": 40, "n2": 40}, **SETTLED)
    assert sum(world.rates().values()) == pytest.approx(200, rel=0.02)
    assert world.loop.most_in() <= 1.1 * RATE * 11


@pytest.mark.parametrize("size", [1_000_000, 2_000_000])
def test_one_connection_is_enough(size):
    world = World(etl(), rule("n1"), rule("n2"))
    for name in ("etl", "n1", "n2"):
        world.reads(name, 1, size)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"etl": 120, "n1": 40, "n2": 40}, **SETTLED)


def test_sizes_of_answers_change_no_share():
    world = World(etl(), rule("n1"), rule("n2"))
    world.reads("etl", 16, 50_000)
    world.reads("n1", 16, 2_000_000)
    world.reads("n2", 16, 500_000)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"etl": 120, "n1": 40, "n2": 40}, **SETTLED)


@pytest.mark.parametrize("notebooks", [6, 12])
def test_a_guarantee_is_a_floor_of_the_share(notebooks):
    names = [f"n{number}" for number in range(notebooks)]
    world = World(etl(), *map(rule, names))
    for name in ("etl", *names):
        world.reads(name)
    world.loop.run(END_MS)
    shares = divide_fairly(200, [Claim(3, 60, 150), *[Claim()] * notebooks])
    assert list(world.rates().values()) == pytest.approx(shares, **SETTLED)


@pytest.mark.parametrize("size", [100, 500])
def test_who_asks_for_little_at_a_time_takes_no_time_from_others(size):
    """Where turns are scarce, and not bytes, each counts as an ordinary one."""
    world = World(rule("tiny", budget=SMALL), rule("plain", budget=SMALL))
    world.loop = LateLoop(world.quotas)
    world.reads("tiny", 64, size, kind=Costly)
    world.reads("plain", 4, 100_000, kind=Costly)
    world.loop.run(END_MS)
    rates = world.rates()
    assert rates["plain"] > 4, rates
    assert sum(rates.values()) == pytest.approx(8, **SETTLED), rates


def test_alone_a_client_gets_its_ceiling():
    world = World(etl(), rule("n1"))
    world.reads("etl", 16)
    world.loop.run(END_MS)
    assert world.rate("etl") == pytest.approx(150, rel=0.02)


def test_a_budget_in_a_budget_is_a_client_of_it():
    world = World(etl(), rule("n1", budget=ADHOC), rule("n2", 3, budget=ADHOC))
    for name in ("etl", "n1", "n2"):
        world.reads(name)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"etl": 150, "n1": 12.5, "n2": 37.5}, **SETTLED)


def test_an_inner_budget_has_a_ceiling_of_its_own():
    adhoc = Budget(name="adhoc", bounds={CONSUMER: 30 * MB}, share=Share(ANALYTICS))
    world = World(etl(), rule("n1", budget=adhoc), rule("n2", budget=adhoc))
    for name in ("etl", "n1", "n2"):
        world.reads(name)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"etl": 150, "n1": 15, "n2": 15}, **SETTLED)


def test_producers_share_as_consumers_do():
    world = World(etl(), rule("n1"), rule("n2"))
    for name, connections in (("etl", 4), ("n1", 16), ("n2", 4)):
        world.writes(name, connections)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"etl": 120, "n1": 40, "n2": 40}, **SETTLED)


SMALL = Budget(name="small", bounds=dict.fromkeys(KINDS, 8 * MB))


@pytest.mark.parametrize("size", [16_000, 60_000, 250_000, 1_000_000])
@pytest.mark.parametrize("others", [60_000, 1_000_000])
def test_a_guarantee_of_writing_is_no_more_than_it_says(size, others):
    """Of a large request only a part is known when its turn comes."""
    world = World(rule("g", 1, 1, budget=SMALL), rule("h", 7, budget=SMALL))
    world.writes_in_parts("g", 8, size)
    world.writes_in_parts("h", 8, others)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"g": 1, "h": 7}, rel=0.1)


@pytest.mark.parametrize("connections", [20, 100, 200])
def test_a_guarantee_of_reading_holds_beside_many_connections(connections):
    """Where so many wait a Fetch brings one record batch, and not what the last one had."""
    world = World(rule("g", 1, 4, budget=SMALL), rule("h", 20, budget=SMALL))
    world.reads("g", 4, 1_000_000, batch_bytes=16_000)
    world.reads("h", connections, 1_000_000, batch_bytes=16_000)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"g": 4, "h": 4}, rel=0.1)


@pytest.mark.parametrize("connections", [20, 200])
def test_a_new_connection_for_each_request_gains_nothing(connections):
    world = World(rule("x", budget=SMALL), rule("h", budget=SMALL))
    world.reads("x", connections, 1_000_000, kind=NewEachTime, batch_bytes=16_000)
    world.reads("h", 30, 1_000_000, batch_bytes=16_000)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"x": 4, "h": 4}, rel=0.1)


@pytest.mark.parametrize("size", [200_000, 1_000_000])
def test_what_is_written_counts_once_however_long_the_requests_are(size):
    world = World(rule("x", budget=SMALL), rule("h", budget=SMALL))
    world.writes_in_parts("x", 8, size)
    world.writes_in_parts("h", 8, 60_000)
    world.loop.run(END_MS)
    assert world.rates() == pytest.approx({"x": 4, "h": 4}, rel=0.1)


def test_what_is_idle_is_lent_and_comes_back_within_a_second():
    world = World(etl(), rule("n1"), rule("n2"))
    world.reads("etl", until_ms=5_000.0)
    world.reads("etl", from_ms=10_000.0)
    world.reads("n1")
    world.reads("n2")
    world.loop.run(15_000.0)
    lent = world.rates(6_000.0, 10_000.0)
    assert lent == pytest.approx({"etl": 0, "n1": 100, "n2": 100}, **SETTLED)
    back = world.rates(11_000.0, 15_000.0)
    assert back == pytest.approx({"etl": 120, "n1": 40, "n2": 40}, **SETTLED)


def test_a_client_that_idled_has_saved_up_no_more_than_a_burst():
    world = World(etl(), rule("n1"), rule("n2"))
    for name in ("etl", "n2"):
        world.reads(name)
    world.reads("n1", from_ms=20_000.0)
    world.loop.run(30_000.0)
    assert world.rate("n1", 20_000.0, 22_000.0) == pytest.approx(40, rel=0.1)
    assert world.rate("n1", 22_000.0, 25_000.0) == pytest.approx(40, rel=0.05)


def test_a_newcomers_small_answer_waits_little_behind_large_ones():
    world = World(rule("n1"), rule("n2"), rule("new"))
    world.reads("n1", 16, 2_000_000)
    world.reads("n2", 16, 2_000_000)
    world.reads("new", 1, 10_000, from_ms=8_000.0, until_ms=12_000.0)
    world.loop.run(END_MS)
    waits = [at_ms - asked_ms for asked_ms, at_ms, _ in world.connections["new"][0].got]
    assert waits[0] <= 100
    assert max(waits) <= 100


def test_a_name_for_each_request_gains_nothing():
    world = World(rule("n1"), Rule(client_id_prefix="x", bounds={}, share=Share(ANALYTICS)))
    world.reads("n1", 4)
    for number in range(1000):  # one after the other, a new name each time
        world.reads(f"x{number}", 1, from_ms=14.0 * number, until_ms=14.0 * number + 10.0)
    world.loop.run(END_MS)
    fresh = sum(rate for name, rate in world.rates().items() if name != "n1")
    assert fresh <= 1.05 * 100


def test_a_paused_client_is_not_counted_in_its_budget():
    rules = (etl(), rule("n1"), rule("n2"))
    world = World(*rules)
    pauses = [QuotaPause({"client-id": "n2"}, until_s=1e12)]
    world.quotas.update(QuotaManagerSettings(rules=rules), RuleTable(rules, pauses=pauses))
    for name in ("etl", "n1"):
        world.reads(name)
    world.reads("n2", 1)
    world.loop.run(END_MS)
    assert world.rate("n2") > 200
    assert world.rate("etl") + world.rate("n1") == pytest.approx(200, rel=0.02)


def test_a_budget_that_is_not_enforced_is_measured():
    seen = Budget(name="seen", bounds={CONSUMER: 10 * MB}, enforce=False)
    world = World(rule("n1", budget=seen), rule("n2", ceiling=20, budget=seen))
    for name in ("n1", "n2"):
        world.reads(name, 2)
    world.loop.run(END_MS)
    assert world.rate("n1") > 100
    assert world.rate("n2") == pytest.approx(20, rel=0.05)
    (meter,) = (each for each in world.quotas.iter_meters() if each.entity == "budget=seen")
    assert meter.rate.measure(END_MS) > 100 * MB
    assert meter.above is not None


def test_the_sensor_of_a_budget_stays_when_those_of_its_clients_go():
    world = World(rule("n1"))
    world.reads("n1", until_ms=1_000.0)
    world.loop.run(2_000.0)
    hour_ms = 3_600_000.0
    assert sum(world.quotas.expiring(2_000.0 + hour_ms)) == 1
    assert [each.entity for each in world.quotas.iter_meters()] == ["budget=analytics"]


def test_a_budget_that_goes_leaves_its_clients_to_what_matches_then():
    world = World(etl(), rule("n1"))
    for name in ("etl", "n1"):
        world.reads(name)
    plain = Rule(client_id="n1", bounds={CONSUMER: 5 * MB})
    world.loop.at(5_000.0, lambda: world.quotas.update(QuotaManagerSettings(rules=(plain,))))
    world.loop.run(20_000.0)
    assert world.rate("etl", 6_000.0, 20_000.0) > 300
    assert world.rate("n1", 18_000.0, 20_000.0) == pytest.approx(5, rel=0.2)


def test_many_clients_share_evenly():
    names = [f"n{number}" for number in range(100)]
    world = World(*map(rule, names))
    for number, name in enumerate(names):
        world.reads(name, 1 + number % 16, 100_000)
    world.loop.run(END_MS)
    assert list(world.rates().values()) == pytest.approx([2.0] * 100, rel=0.05)
    assert sum(world.rates().values()) == pytest.approx(200, rel=0.02)


def test_what_a_rule_says_of_its_budget_is_kept_as_text():
    made = etl(budget=ADHOC)
    assert Rule.of(made.document()) == made
    assert made.ceilings[CONSUMER] == 150 * MB
    assert rule("n1").ceilings[PRODUCER] == RATE
