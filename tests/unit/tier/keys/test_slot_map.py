"""The map of slots says who owns each, and where a broker is reached at a member."""

from dataclasses import replace

import pytest

from proxy.relay.steering import AdvertisedListener, MemberAddresses
from proxy.tier.slot_map import SlotMap

IN_RANGE = AdvertisedListener("proxy-1", 9092, first=9100, last=9109)
BY_NAME = AdvertisedListener("proxy-1", 9092, first=9200, last=9200, sni="b{node_id}.proxy")
BY_SYSTEM = AdvertisedListener("proxy-1", 9092, ports={1: 40001, 2: 40002})
FIRST = MemberAddresses("proxy-1/0", {"in": IN_RANGE, "out": BY_NAME})
SECOND = MemberAddresses("proxy-1/1", {"in": BY_SYSTEM})
MAP = SlotMap({each.name: each for each in (FIRST, SECOND)}, [FIRST.name, None, SECOND.name])


def test_owners_of_slots():
    assert [MAP.owner_of(slot) for slot in range(3)] == [FIRST, None, SECOND]
    assert MAP.slots_of(SECOND.name) == {2}
    assert MAP.slots_of("unknown") == frozenset()


@pytest.mark.parametrize(
    ("ports", "node_id", "address"),
    [
        (IN_RANGE, 0, ("proxy-1", 9100)),
        (IN_RANGE, 9, ("proxy-1", 9109)),
        (IN_RANGE, 10, None),
        (IN_RANGE, -1, None),
        (BY_NAME, 5, ("b5.proxy", 9200)),
        (AdvertisedListener("h", 9092, sni="b{node_id}.proxy"), 5, ("b5.proxy", 9092)),
        (BY_SYSTEM, 2, ("proxy-1", 40002)),
        (BY_SYSTEM, 3, None),
    ],
)
def test_address_of_a_broker(ports, node_id, address):
    assert ports.address_of(node_id) == address


def test_who_is_no_member_owns_nothing():
    with pytest.raises(ValueError, match="who are no members"):
        replace(MAP, owners=["proxy-2/0"])
