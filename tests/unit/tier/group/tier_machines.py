"""Announcements and subscriptions for the tests, and sizes as they are in a real tier."""

from collections.abc import Collection

from proxy.tier.group.subscription import Announcement, Subscription
from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import ListenerPorts, MemberAddresses
from proxy.tier.slots import SLOTS


def member(name: str) -> MemberAddresses:
    return MemberAddresses(name, {"default": ListenerPorts(f"{name}.example", 9092, 9100, 9199)})


def announcement(name: str, *, cluster_id: str = "one", slots: int = SLOTS) -> Announcement:
    url = f"http://{name}.example:8080"
    return Announcement(member(name), url, cluster_id, "d1", 1_700_000_000.25, slots)


def subscription(
    name: str,
    owned: Collection[int] = (),
    *,
    process: str = "",
    generation: int = -1,
    letting_go: frozenset[int] = frozenset(),
    said: Announcement | None = None,
) -> Subscription:
    return Subscription(
        said or announcement(name),
        process or f"process of {name}",
        frozenset(owned),
        letting_go,
        generation,
        max(generation, 0),
    )


def load(slot: int) -> SlotLoad:
    return SlotLoad(float(slot * 1000), slot / 1000)
