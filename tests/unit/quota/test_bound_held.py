"""A closed loop of connections on virtual time: what comes out of the manager is the bound."""

import heapq
import itertools

import pytest
from prometheus_client import CollectorRegistry

from metrics import Instruments, Registry
from proxy.quota import ClientIdentity, QuotaKind, QuotaManager, QuotaSettings, Rule

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
MB = 1_000_000
START_MS, END_MS = 10_000.0, 40_000.0
ROUND_TRIP_MS = 0.2


def make_manager(bound: float, max_delay_ms: float) -> QuotaManager:
    settings = QuotaSettings(
        rules=(Rule(client_id="c", bounds={CONSUMER: bound}),), max_delay_ms=max_delay_ms
    )
    instruments = Instruments(CollectorRegistry(), max_label_sets=100)
    return QuotaManager(settings, instruments, Registry(settings.max_sensors))


def client_of(manager: QuotaManager):
    return manager.client(ClientIdentity("l", None, "c"))


def run(
    connections: int, bound: float, size: int, max_delay_ms: float = 120_000.0
) -> list[tuple[float, int]]:
    """Return (time, bytes) of every response released until END_MS."""
    client = client_of(make_manager(bound, max_delay_ms))
    asking = [(0.1 * number, number) for number in range(connections)]
    released: list[tuple[float, int]] = []
    while asking[0][0] <= END_MS:
        now_ms, number = heapq.heappop(asking)
        charge = client.charge(CONSUMER, size, now_ms)
        out_ms = charge.due_ms if charge else now_ms
        released.append((out_ms, size))
        heapq.heappush(asking, (out_ms + ROUND_TRIP_MS, number))
    return sorted(released)


def rate_between(released: list[tuple[float, int]], start_ms: float, end_ms: float) -> float:
    """Return bytes per second from the first to the last whole response in the time."""
    inside = [entry for entry in released if start_ms <= entry[0] <= end_ms]
    seconds = (inside[-1][0] - inside[0][0]) / 1000
    # Responses that leave together with the first one belong to the time before it.
    return sum(size for at_ms, size in inside if at_ms > inside[0][0]) / seconds


@pytest.mark.parametrize("size", [50_000, 500_000, 2_000_000])
@pytest.mark.parametrize("bound", [1 * MB, 10 * MB, 100 * MB])
@pytest.mark.parametrize("connections", [1, 4, 32])
def test_from_10_to_40_seconds_the_rate_of_released_bytes_is_the_bound(connections, bound, size):
    released = run(connections, bound, size)
    assert rate_between(released, START_MS, END_MS) == pytest.approx(bound, rel=0.02)


def test_what_exceeds_max_delay_is_held_later_so_the_rate_comes_back_to_the_bound():
    max_delay_ms = 3_000.0
    client = client_of(make_manager(MB, max_delay_ms))
    now_ms = total = 0.0
    delays = []
    for size in (40 * MB, *[500_000] * 200):  # the first one is worth 30 s of holding
        charge = client.charge(CONSUMER, size, now_ms)
        delays.append(charge.delay_ms if charge else 0)
        now_ms += delays[-1]
        total += size
    assert delays[:11] == [max_delay_ms] * 11
    assert delays[-1] == 500
    burst = 10 * MB  # a fresh sensor takes the 10 s before it as empty
    assert (total - burst) / now_ms * 1000 == pytest.approx(MB, rel=0.001)


@pytest.mark.parametrize(
    ("on_s", "off_s"), [(1, 1), (3, 2), (5, 5), (8, 1.5), (2, 8), (20, 3), (20, 12)]
)
def test_a_client_that_pauses_gets_its_bound_and_no_more(on_s, off_s):
    client = client_of(make_manager(MB, 20_000.0))
    now_ms = 0.0
    totals: list[tuple[float, float]] = [(0.0, 0.0)]
    while now_ms < 600_000:
        phase_ms = now_ms % ((on_s + off_s) * 1000)
        if phase_ms > on_s * 1000:
            now_ms += (on_s + off_s) * 1000 - phase_ms + 0.1
        charge = client.charge(CONSUMER, 200_000, now_ms)
        now_ms = (charge.due_ms if charge else now_ms) + ROUND_TRIP_MS
        totals.append((now_ms, totals[-1][1] + 200_000))
    # The burst that a fresh sensor grants is left out.
    first = next(entry for entry in totals if entry[0] >= 60_000)
    last = totals[-1]
    rate = (last[1] - first[1]) / (last[0] - first[0]) * 1000
    assert 0.9 * MB <= rate <= 1.02 * MB


@pytest.mark.parametrize("share", [0.3, 0.9, 0.98])
def test_a_client_that_asks_for_less_than_its_bound_is_hardly_held(share):
    client = client_of(make_manager(MB, 20_000.0))
    held_ms = 0.0
    for number in range(10_000):
        charge = client.charge(CONSUMER, 20_000, number * 20 / share)
        held_ms += charge.delay_ms if charge else 0
    assert held_ms == 0


def test_a_bound_changed_at_run_time_is_kept_from_that_moment():
    manager = make_manager(10 * MB, 20_000.0)
    client = client_of(manager)
    now_ms = 0.0
    for bound, end_ms in ((10, 40_000), (2, 70_000), (50, 100_000), (1, 130_000)):
        manager.update(QuotaSettings(rules=(Rule(client_id="c", bounds={CONSUMER: bound * MB}),)))
        start_ms, total = now_ms, 0
        while now_ms < end_ms:
            charge = client.charge(CONSUMER, 500_000, now_ms)
            now_ms = (charge.due_ms if charge else now_ms) + ROUND_TRIP_MS
            total += 500_000
        burst = 10 * bound * MB if start_ms == 0 else 0
        rate = (total - burst) / (now_ms - start_ms) * 1000
        assert rate == pytest.approx(bound * MB, rel=0.03), f"bound {bound} MB/s"


def test_held_responses_leave_evenly_over_the_connections():
    client = client_of(make_manager(MB, 120_000.0))
    asking = [(0.1 * number, number) for number in range(8)]
    counts = dict.fromkeys(range(8), 0)
    for _ in itertools.repeat(None, 4000):
        now_ms, number = heapq.heappop(asking)
        charge = client.charge(CONSUMER, 100_000, now_ms)
        counts[number] += charge is not None
        heapq.heappush(asking, ((charge.due_ms if charge else now_ms) + ROUND_TRIP_MS, number))
    assert max(counts.values()) - min(counts.values()) <= 20
