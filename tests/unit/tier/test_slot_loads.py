"""What the clients of each slot take, measured by their member."""

import math

import pytest

from proxy.quota.entities import ClientIdentity
from proxy.tier.slot_loads import (
    AVERAGE_S,
    EXCHANGE_BYTES,
    LEAST_MEASURED_S,
    MAX_NAMED_OF_SLOT,
    WALKED_AT_ONCE,
    LoadMeter,
)

STEP_S = 5.0
SLOTS = {"a": 1, "b": 1, "c": 2}


def client(name: str, user: str | None = None) -> ClientIdentity:
    return ClientIdentity("main", user, name)


def slot_of(identity: ClientIdentity) -> int:
    return SLOTS.get(identity.client_id or "", 3)


ConnectionRates = tuple[dict[ClientIdentity, float], dict[ClientIdentity, float]]


def traffic(sizes: dict[str, float], exchanges: dict[str, float] | None = None) -> ConnectionRates:
    return (
        {client(name): size for name, size in sizes.items()},
        {client(name): count for name, count in (exchanges or {}).items()},
    )


class TimedMeter(LoadMeter):
    """With the times of the latest measurement."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s, self.cpu_s = 100.0, 0.0


def measure(
    meter: TimedMeter, seen: ConnectionRates, seconds: float, cpu_share: float = 0.5
) -> None:
    began_s, cpu_s = meter.at_s, meter.cpu_s
    for step in range(round(seconds / STEP_S) + 1):
        passed_s = step * STEP_S
        meter.at_s, meter.cpu_s = began_s + passed_s, cpu_s + passed_s * cpu_share
        for _ in meter.measuring(*seen, slot_of, meter.at_s, meter.cpu_s):
            pass


def test_steady_traffic_becomes_the_average():
    meter = TimedMeter()
    measure(meter, traffic({"a": 1e6, "b": 2e6, "c": 1e6}), 10 * AVERAGE_S)
    assert meter.loads[1].bytes_per_s == pytest.approx(3e6, rel=1e-3)
    assert meter.loads[2].bytes_per_s == pytest.approx(1e6, rel=1e-3)
    assert meter.loads[1].cpu_share == pytest.approx(0.375, rel=1e-3)
    assert meter.loads[2].cpu_share == pytest.approx(0.125, rel=1e-3)


def test_the_first_look_only_begins():
    meter = TimedMeter()
    measure(meter, traffic({"a": 1e6}), 0)
    assert meter.loads == {}


def test_an_average_rises_and_falls_with_its_time_constant():
    meter = TimedMeter()
    measure(meter, traffic({"a": 1e6}), AVERAGE_S)
    assert meter.loads[1].bytes_per_s == pytest.approx(1e6 * (1 - 1 / math.e))
    measure(meter, traffic({}), AVERAGE_S)
    assert meter.loads[1].bytes_per_s == pytest.approx(1e6 * (1 - 1 / math.e) / math.e)
    measure(meter, traffic({}), 20 * AVERAGE_S)
    assert meter.loads == {}


def test_small_requests_take_cpu_time_too():
    meter = TimedMeter()
    seen = traffic({"a": 1e3, "c": 1e3 + 100 * EXCHANGE_BYTES}, {"a": 100.0})
    measure(meter, seen, 10 * AVERAGE_S)
    assert meter.loads[1].cpu_share == pytest.approx(meter.loads[2].cpu_share)


def test_clients_that_get_other_slots_are_measured_anew():
    meter = TimedMeter()
    measure(meter, traffic({"a": 1e6}), 0)
    assert not meter.announce({1, 7}, {})
    measure(meter, traffic({"a": 1e6}), LEAST_MEASURED_S)
    assert meter.announce({1, 7}, {})
    for step in range(round(LEAST_MEASURED_S / STEP_S) + 1):
        meter.at_s += STEP_S
        for _ in meter.measuring(*traffic({"a": 1e6}), lambda_of_seven, meter.at_s, 0.0):
            pass
        assert meter.announce({1, 7}, {}) is (step * STEP_S >= LEAST_MEASURED_S)
    assert meter.loads[7].bytes_per_s > meter.loads[1].bytes_per_s * 0.5


def lambda_of_seven(_: ClientIdentity) -> int:
    return 7


def test_the_biggest_clients_of_a_large_slot_are_named():
    meter = TimedMeter()
    sizes = {client(f"n{number}"): 1e3 + number for number in range(10)}
    sizes[client("x", "olaf")] = 1e6
    measure(meter, (sizes, {}), 10 * AVERAGE_S, cpu_share=0.9)
    assert meter.clients[3][:2] == ["user=olaf,client-id=x", "client-id=n9"]
    assert len(meter.clients[3]) == MAX_NAMED_OF_SLOT
    quiet = TimedMeter()
    measure(quiet, (sizes, {}), 10 * AVERAGE_S, cpu_share=0.1)
    assert quiet.clients == {}


def test_ten_thousand_clients_are_walked_in_steps():
    meter = TimedMeter()
    sizes = {client(str(number)): 1e3 for number in range(10_000)}
    steps = list(meter.measuring(sizes, {}, slot_of, 1.0, 0.0))
    assert len(steps) == 10_000 / WALKED_AT_ONCE
