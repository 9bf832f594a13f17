"""What counts as time that a broker is at work for a client, and the bound on it."""

from collections import deque

import pytest
from closed_loop import ClosedLoop, make_manager

from proxy.quota.busy import FIRST_USUAL_MS, BusyTime
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import QuotaManagerSettings, Rule

REQUEST = QuotaKind.REQUEST_PERCENTAGE
SERVICE_MS = 4.0


def test_requests_one_after_another_count_each():
    busy = BusyTime()
    assert busy.answered(0.0, 0.0, 4.0) == 4.0
    assert busy.answered(10.0, 0.0, 13.0) == 3.0


def test_what_is_in_flight_together_counts_once():
    busy = BusyTime()
    assert [busy.answered(0.0, 0.0, at_ms) for at_ms in (4.0, 8.0, 8.0, 20.0)] == [4, 4, 0, 12]


def test_of_what_may_have_waited_for_data_the_usual_time_counts():
    busy = BusyTime()
    assert busy.answered(0.0, 500.0, 504.0) == 4.0
    assert busy.answered(600.0, 500.0, 610.0) == FIRST_USUAL_MS
    assert busy.answered(700.0, 500.0, 700.5) == 0.5


def test_all_of_the_time_counts_of_an_answer_that_had_data():
    busy = BusyTime()
    assert busy.answered(0.0, 500.0, 40.0) == FIRST_USUAL_MS
    assert busy.had_data() == 40.0 - FIRST_USUAL_MS
    assert busy.had_data() == 0.0


def test_the_usual_time_is_that_of_most_answers_that_had_data():
    busy, now_ms = BusyTime(), 0.0
    for number in range(100):
        took_ms = 40.0 if number % 10 else 5000.0
        busy.answered(now_ms, 500.0, now_ms + took_ms)
        busy.had_data()
        now_ms += took_ms
    assert busy.answered(now_ms, 500.0, now_ms + 400.0) == pytest.approx(40.0, rel=0.3)


def test_holds_do_not_count_and_what_came_behind_one_counts_like_the_last():
    busy = BusyTime()
    assert busy.answered(0.0, 0.0, 4.0) == 4.0
    busy.held(1000.0)
    assert busy.answered(1.0, 0.0, 1000.0) == 4.0
    assert busy.answered(1002.0, 0.0, 1005.0) == 3.0


class Client:
    """One connection with `depth` requests under way, before a broker that takes 4 ms for each."""

    def __init__(self, world: ClosedLoop, depth: int) -> None:
        self.world, self.depth = world, depth
        self.busy = BusyTime()
        self.in_flight: deque[float] = deque()
        self.ready: deque[float] = deque()
        self.broker_free_ms = 0.0
        self.held_until_ms = 0.0
        self.answers = 0
        self.held_ms = 0.0
        self.longest_ms = 0.0
        self.service_ms = SERVICE_MS

    def ask(self) -> None:
        world, client = self.world, self.world.client
        while len(self.in_flight) < self.depth:
            if self.in_flight and client.is_paced(REQUEST):
                return
            self.in_flight.append(world.now_ms)
            self.broker_free_ms = max(self.broker_free_ms, world.now_ms) + self.service_ms
            world.at(self.broker_free_ms, self.arrived)

    def arrived(self) -> None:
        self.ready.append(self.world.now_ms)
        self.read()

    def read(self) -> None:
        """Take the next response, unless one is held before it."""
        world = self.world
        if not self.ready or world.now_ms < self.held_until_ms:
            return
        self.ready.popleft()
        sent_ms = self.in_flight[0]
        busy_ms = self.busy.answered(sent_ms, 0.0, world.now_ms)
        charge = world.client.charge(REQUEST, busy_ms, world.now_ms)
        if charge is not None:
            self.held_until_ms = charge.due_ms
            self.held_ms += charge.delay_ms
            self.busy.held(charge.due_ms)
        world.at(self.held_until_ms, self.leave)

    def leave(self) -> None:
        self.longest_ms = max(self.longest_ms, self.world.now_ms - self.in_flight.popleft())
        self.answers += 1
        self.ask()
        self.read()


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("percent", [5.0, 10.0, 50.0])
def test_a_client_gets_its_share_of_time_whatever_is_under_way(percent, depth):
    world = ClosedLoop(make_manager(1e9))
    rule = Rule(client_id="c", bounds={REQUEST: percent})
    world.manager.update(QuotaManagerSettings(rules=(rule,)))
    client = Client(world, depth)
    world.at(0.0, client.ask)
    start_ms, end_ms = 30_000.0, 90_000.0
    world.run(start_ms)
    before, client.longest_ms = client.answers, 0.0
    world.run(end_ms)
    got_percent = (client.answers - before) * SERVICE_MS / (end_ms - start_ms) * 100
    assert got_percent == pytest.approx(percent, rel=0.05)
    assert client.longest_ms <= 1000.0 + SERVICE_MS, "one window"


@pytest.mark.parametrize("percent", [5.0, 10.0, 50.0])
def test_after_a_spike_a_client_waits_until_it_has_left_the_windows(percent):
    """As Kafka has it: of the ten seconds after it, no more than one is not spent waiting."""
    world = ClosedLoop(make_manager(1e9))
    world.manager.update(
        QuotaManagerSettings(rules=(Rule(client_id="c", bounds={REQUEST: percent}),))
    )
    client = Client(world, 1)
    client.service_ms = spike_ms = 20_000.0
    world.at(0.0, client.ask)
    world.run(spike_ms)
    client.service_ms, client.answers, client.held_ms = SERVICE_MS, 0, 0.0
    world.run(spike_ms + 10_000.0)
    assert client.held_ms >= 9000.0
    assert client.answers <= 11
    world.run(spike_ms + 15_000.0)
    client.answers, again_ms = 0, 60_000.0
    world.run(spike_ms + 15_000.0 + again_ms)
    assert client.answers * SERVICE_MS / again_ms * 100 == pytest.approx(percent, rel=0.05)
