"""Which rows are shown together: what operators take for one client."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.admin.sensor_rows import rows_by_client
from proxy.quota.entities import DEFAULT, TRAFFIC_KINDS, QuotaKind
from proxy.quota.rules import Rule

CONSUMER, PRODUCER, REQUEST, *_ = QuotaKind
ALL_KINDS = dict.fromkeys(TRAFFIC_KINDS, 1e6)
EACH = Rule(client_id=DEFAULT, bounds=ALL_KINDS)
BY_USER = Rule(user=DEFAULT, client_id=DEFAULT, bounds={PRODUCER: 1e6}, number=1)
TOGETHER = Rule(client_id_prefix="t-", scope="shared", bounds={CONSUMER: 1e6}, number=2)
RULES = (EACH, BY_USER, TOGETHER)


def groups(world: QuotaWorld) -> list[set[tuple[str, QuotaKind]]]:
    found = rows_by_client(world.quotas, lambda: 0.0)
    return [{(row.meter.entity, row.meter.kind) for row in rows} for rows in found if rows]


def use(world: QuotaWorld, *who: str | None, kinds: tuple[QuotaKind, ...] = TRAFFIC_KINDS):
    client = world.client_quotas(*who)
    for kind in kinds:
        client.charge(kind, 1.0, 0.0)
    return client


def test_all_quotas_of_a_client_are_together_whatever_rule_they_are_of():
    world = QuotaWorld(*RULES)
    use(world, "a", "alice")
    use(world, "b")
    assert groups(world) == [
        {
            ("client-id=a", CONSUMER),
            ("user=alice,client-id=a", PRODUCER),
            ("client-id=a", REQUEST),
        },
        {("client-id=b", kind) for kind in TRAFFIC_KINDS},
    ]


def test_what_several_clients_share_is_by_itself():
    world = QuotaWorld(*RULES)
    use(world, "t-1")
    use(world, "t-2")
    rest = (PRODUCER, REQUEST)
    assert groups(world) == [
        {("client-id-prefix=t-", CONSUMER)},
        {("client-id=t-1", kind) for kind in rest},
        {("client-id=t-2", kind) for kind in rest},
    ]


def test_the_same_client_id_on_two_listeners_shares_all_of_its_quotas():
    world = QuotaWorld(EACH)
    use(world, "a", None, "one")
    use(world, "a", None, "two")
    assert groups(world) == [{("client-id=a", kind) for kind in TRAFFIC_KINDS}]


@pytest.mark.parametrize("again", [CONSUMER, PRODUCER, REQUEST])
def test_a_client_that_comes_back_gets_what_it_left(again: QuotaKind):
    world = QuotaWorld(EACH)
    use(world, "a").close()
    assert groups(world) == [{("client-id=a", kind) for kind in TRAFFIC_KINDS}]
    use(world, "a", kinds=(again,))
    assert groups(world) == [{("client-id=a", kind) for kind in TRAFFIC_KINDS}]


USES = st.tuples(
    st.sampled_from(("a", "t-1", "t-2")),
    st.sampled_from((None, "alice", "bob")),
    st.sampled_from(("one", "two")),
    st.sets(st.sampled_from(TRAFFIC_KINDS)),
    st.booleans(),
)


@given(st.lists(USES, max_size=8), st.lists(USES, max_size=3))
def test_each_sensor_is_in_one_group_whoever_comes_and_goes(before, meanwhile):
    world = QuotaWorld(*RULES)

    def play(uses):
        for *who, kinds, stays in uses:
            client = use(world, *who, kinds=tuple(kinds))
            if not stays:
                client.close()

    play(before)
    sensors = {(row.entity, row.kind) for row in world.rows(0.0)}
    steps = rows_by_client(world.quotas, lambda: 0.0)
    found = [next(steps, [])]
    play(meanwhile)
    found += steps
    rows = [(row.meter.entity, row.meter.kind) for group in found for row in group]
    assert len(rows) == len(set(rows))
    assert sensors <= set(rows)
    for group in found:
        assert len({row.clients for row in group if row.client_count == 1}) <= 1
