"""Figure: what one charge and one new connection cost with 10 to 100,000 client quota entities.

The quota manager stands alone in this process. Every entity is charged once in a second of the
manager's time, however many there are, so that each call does the same work on the sensor's
samples. Only one manager is there at a time: the garbage collector has as many objects to visit as
the proxy would have. The numbers of entities take turns within each round. What counts is the
computing time, so that other processes on the machine matter little.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

from prometheus_client import CollectorRegistry

from bench.report import Row, Verdict
from metrics import Instruments
from metrics.clock import MS_PER_SECOND
from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import QuotaSettings, Rule

FIGURE = "entities"
TARGET_RATIO = 1.3
ENTITIES = (10, 1_000, 100_000)
FULL_CALLS, QUICK_CALLS = 100_000, 10_000
FULL_ROUNDS, QUICK_ROUNDS = 5, 1
# Charged once a second with so much, an entity is far below its bound.
BOUND = 1e6
CHARGED_BYTES = 1e4
KIND = QuotaKind.CONSUMER_BYTE_RATE
# So many seconds of the manager's time, in which the sensors get all their samples.
WARM_UP_S = 12

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class Cost:
    """Mean time of a call, in microseconds.

    Attributes:
        charge_us: traffic of a client whose handle the connection has.
        resolve_us: a connection of a client that is known comes, is charged once, and goes.

    """

    charge_us: float
    resolve_us: float


def measure(quick: bool) -> list[Row]:
    """Measure all numbers of entities in turn and give the rows."""
    rounds, calls = (QUICK_ROUNDS, QUICK_CALLS) if quick else (FULL_ROUNDS, FULL_CALLS)
    costs: dict[int, list[Cost]] = {count: [] for count in ENTITIES}
    for _ in range(rounds):
        for count in ENTITIES:
            costs[count].append(_cost(count, calls))
    return [
        _row(
            "charge a response",
            {each: [cost.charge_us for cost in found] for each, found in costs.items()},
        ),
        _row(
            "resolve a connection",
            {each: [cost.resolve_us for cost in found] for each, found in costs.items()},
        ),
    ]


def _cost(count: int, calls: int) -> Cost:
    settings = QuotaSettings(
        rules=(Rule(client_id=DEFAULT, bounds={KIND: BOUND}),), max_client_entities=count
    )
    instruments = Instruments(CollectorRegistry(), max_label_sets=count)
    manager = QuotaManager(settings, instruments)
    identities = [ClientIdentity("bench", None, f"client-{number}") for number in range(count)]
    clients = [manager.client(identity) for identity in identities]
    step_ms = MS_PER_SECOND / count
    now_ms = 0.0

    def charge(client: ClientQuotas) -> None:
        nonlocal now_ms
        now_ms += step_ms
        client.charge(KIND, CHARGED_BYTES, now_ms)

    def resolve(identity: ClientIdentity) -> None:
        client = manager.client(identity)
        charge(client)
        client.close()

    # With many entities this takes longest by far; their sensors have no more samples than that.
    for client in islice(cycle(clients), WARM_UP_S * count):
        charge(client)
    gc.collect()  # what was made above must not be visited at the cost of what follows
    charge_us = _mean_us(charge, islice(cycle(clients), calls), calls)
    for client in clients:
        client.close()
    return Cost(charge_us, _mean_us(resolve, islice(cycle(identities), calls), calls))


def _mean_us(call: Callable[[Argument], None], arguments: Iterator[Argument], calls: int) -> float:
    started_s = time.thread_time()
    for argument in arguments:
        call(argument)
    return (time.thread_time() - started_s) / calls * 1e6


def _row(what: str, times_us: dict[int, list[float]]) -> Row:
    """Compare the dearest number of entities with the cheapest one."""
    medians = {count: statistics.median(times) for count, times in times_us.items()}
    ratio = max(medians.values()) / min(medians.values())
    each = ", ".join(f"{count:,}: {median:.2f}" for count, median in medians.items())
    return Row(
        FIGURE,
        what,
        f"within {TARGET_RATIO:.1f}x",
        f"{ratio:.2f}x (µs with {each})",
        Verdict.of(ratio <= TARGET_RATIO),
        {"microseconds": {str(count): times for count, times in times_us.items()}},
    )
