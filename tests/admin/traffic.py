"""Ten minutes of traffic of several clients, played into a world in virtual time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

from admin_world import CONSUMER, HOSTILE, MIB, PRODUCER, REQUEST, AdminWorld, tick
from parts.at_once import at_once
from parts.virtual_time import START_MS

from metrics.clock import MS_PER_SECOND
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rule_registry import make_override

TEN_MINUTES_MS = 600_000.0
TICK_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Actor:
    """A client that asks again as soon as it is answered, at most at the rate it wants."""

    client_id: str
    kind: QuotaKind
    size: float
    wants: Callable[[float], float]
    """Rate by time in seconds; 0 asks for nothing."""
    user: str | None = None
    listener: str = "default"


ACTORS = (
    Actor("etl-orders", CONSUMER, 4 * MIB, lambda t: 40 * MIB if t > 150 else 6 * MIB),
    Actor("consumer-reports-7f3a", CONSUMER, MIB, lambda t: (9 + 6 * math.sin(t / 40)) * MIB),
    Actor("consumer-reports-c01d", CONSUMER, MIB, lambda t: (4 + 3 * math.sin(t / 25)) * MIB),
    Actor("ingest-clicks", PRODUCER, MIB / 4, lambda t: 2 * MIB if t % 200 > 90 else 0, "alice"),
    Actor("spark-kafka-source-2b1e-driver", CONSUMER, MIB, lambda t: 30 * MIB * (t % 60 < 22)),
    Actor("dashboards", REQUEST, 20.0, lambda t: 120 + 90 * math.sin(t / 55), None, "tenants"),
    Actor("mirror-eu", CONSUMER, 4 * MIB, lambda t: 70 * MIB if t > 420 else 21 * MIB),
    Actor(HOSTILE, CONSUMER, MIB / 8, lambda _: 1.3 * MIB),
)


def play(
    world: AdminWorld, actors: tuple[Actor, ...] = ACTORS, until_ms: float | None = None
) -> None:
    """Let the actors work until ten minutes after the start, or until a time."""
    end_ms = START_MS + TEN_MINUTES_MS if until_ms is None else until_ms
    handles = [
        world.quotas.client(ClientIdentity(actor.listener, actor.user, actor.client_id))
        for actor in actors
    ]
    due: list[tuple[float, int]] = [(world.now_ms, number) for number in range(len(actors) + 1)]
    while due[0][0] <= end_ms:
        world.now_ms, number = heappop(due)
        if number == len(actors):
            tick(world.history, world.now_ms)
            sum(world.quotas.sweeping(world.now_ms))
            heappush(due, (world.now_ms + TICK_MS, number))
            continue
        actor = actors[number]
        rate = actor.wants((world.now_ms - START_MS) / MS_PER_SECOND)
        if not rate:
            heappush(due, (world.now_ms + TICK_MS, number))
            continue
        charge = handles[number].charge(actor.kind, actor.size, world.now_ms)
        next_ms = world.now_ms + actor.size / rate * MS_PER_SECOND
        if charge is not None:
            world.quotas.held(charge, charge.delay_ms, world.now_ms)
            next_ms = max(next_ms, charge.due_ms)
        heappush(due, (next_ms, number))


ALICE = {"user": "alice", "client-id": "ingest-clicks"}

PICTURE_MS = START_MS + 599_730.0
"""A moment in the middle of two holds."""


def scene(
    world: AdminWorld, actors: tuple[Actor, ...] = ACTORS, until_ms: float | None = None
) -> None:
    """Let somebody set a quota, and ten minutes of traffic go by."""
    at_once(world.rules.put(make_override(ALICE, {PRODUCER: MIB}, by="anna", at_s=1_790_000_000.0)))
    play(world, actors, until_ms)
