"""Announcements and subscriptions for the tests, and sizes as they are in a real tier."""

from collections.abc import Collection
from dataclasses import replace

from proxy.relay.steering import AdvertisedListener, MemberAddresses
from proxy.tier.group.group_documents import Subscription
from proxy.tier.slot_balance import SlotLoad
from proxy.tier.slot_map import SLOTS


def member(name: str) -> MemberAddresses:
    return MemberAddresses(
        name, {"default": AdvertisedListener(f"{name}.example", 9092, 9100, 9199)}
    )


def announcement(name: str, *, cluster_id: str = "one", slots: int = SLOTS) -> Subscription:
    url = f"http://{name}.example:8080"
    return Subscription(member(name), url, cluster_id, "d1", 1_700_000_000.25, slots)


def subscription(
    name: str,
    owned: Collection[int] = (),
    *,
    process: str = "",
    generation: int = -1,
    releasing: frozenset[int] = frozenset(),
    said: Subscription | None = None,
) -> Subscription:
    return replace(
        said or announcement(name),
        process=process or f"process of {name}",
        owned=frozenset(owned),
        releasing=releasing,
        generation=generation,
    )


def load(slot: int) -> SlotLoad:
    return SlotLoad(float(slot * 1000), slot / 1000)
