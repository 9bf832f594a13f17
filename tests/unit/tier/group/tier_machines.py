"""Announcements and subscriptions for the tests, and sizes as they are in a real tier."""

from proxy.tier.group.subscription import Announcement, Subscription
from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import ListenerPorts, MemberAddresses
from proxy.tier.slots import SLOTS


def member(name: str) -> MemberAddresses:
    return MemberAddresses(name, {"default": ListenerPorts(f"{name}.example", 9092, 9100, 9199)})


def announcement(
    machine: str, workers: int = 1, *, cluster_id: str = "one", slots: int = SLOTS
) -> Announcement:
    members = tuple(member(f"{machine}/{number}") for number in range(workers))
    url = f"http://{machine}.example:8080"
    return Announcement(machine, members, url, cluster_id, "d1", 1_700_000_000.25, slots)


def subscription(
    machine: str,
    owned: dict[int, str] | None = None,
    *,
    process: str = "",
    generation: int = -1,
    letting_go: frozenset[int] = frozenset(),
    said: Announcement | None = None,
) -> Subscription:
    return Subscription(
        said or announcement(machine),
        process or f"process of {machine}",
        owned or {},
        letting_go,
        generation,
        max(generation, 0),
    )


def load(slot: int) -> SlotLoad:
    return SlotLoad(float(slot * 1000), slot / 1000)
