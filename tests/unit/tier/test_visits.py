"""What visitors have had is added up, reaches their owners once, and survives JSON."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import Rule
from proxy.relay.steering import Visit
from proxy.tier.peer_client import PeerClient
from proxy.tier.peers import Peers
from proxy.tier.slot_map import SlotSteering
from proxy.tier.visits import MAX_VISITS, VisitReporting, encode_visit, read_visit

NAMES = st.sampled_from([None, "", "a", "b=\udcff,", "<default>"])
VISITS = st.builds(
    Visit,
    identity=st.builds(
        ClientIdentity, listener=st.sampled_from(["x", "y"]), user=NAMES, client_id=NAMES
    ),
    address=st.sampled_from(["127.0.0.1", "::1"]),
    kind=st.sampled_from(QuotaKind),
    amount=st.floats(0, 1e9),
)


@given(st.lists(st.tuples(st.sampled_from("pq"), VISITS)))
def test_owners_are_told_the_sum_of_each_client_once(visits: list[tuple[str, Visit]]) -> None:
    log = VisitReporting(QuotaWorld().quotas, SlotSteering("a"), Peers(PeerClient()))
    expected: dict[tuple[str, ClientIdentity, QuotaKind], float] = {}
    for owner, visit in visits:
        log.add(owner, visit)
        key = owner, visit.identity, visit.kind
        expected[key] = expected.get(key, 0.0) + visit.amount
    told = {
        (owner, visit.identity, visit.kind): visit.amount
        for owner in {owner for owner, _ in visits}
        for visit in log.take(owner)
    }
    assert told == pytest.approx(expected)
    assert not any(log.take(owner) for owner in "pq")


def test_what_exceeds_a_message_waits_for_the_next_one() -> None:
    log = VisitReporting(QuotaWorld().quotas, SlotSteering("a"), Peers(PeerClient()))
    for number in range(MAX_VISITS + 1):
        identity = ClientIdentity("x", None, str(number))
        log.add("p", Visit(identity, "::1", QuotaKind.CONSUMER_BYTE_RATE, 1.0))
    assert [len(log.take("p")) for _ in range(3)] == [MAX_VISITS, 1, 0]


@given(VISITS)
def test_a_visit_survives_json(visit: Visit) -> None:
    assert read_visit(json.loads(json.dumps(encode_visit(visit)))) == visit


async def test_only_what_is_owed_is_answered() -> None:
    world = QuotaWorld(Rule(client_id="slow", bounds={QuotaKind.CONSUMER_BYTE_RATE: 1000.0}))
    exchanges = VisitReporting(world.quotas, SlotSteering("a"), Peers(PeerClient()))
    visits = [
        Visit(ClientIdentity("x", None, name), "::1", QuotaKind.CONSUMER_BYTE_RATE, 1e6)
        for name in ("slow", "free")
    ]
    (row,) = await exchanges.charge([encode_visit(each) for each in visits])
    owed = read_visit(row)
    assert owed == replace(visits[0], amount=owed.amount)
    assert owed.amount > 0


@pytest.mark.parametrize(
    "row", [[], ["x", None, None, "::1", "no_kind", 1], ["x", 1, None, "::1", "bytes", 1]]
)
def test_anything_else_is_refused(row: list[object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_visit(row)
