"""Connections are counted and paced by the rules of their clients, on virtual time."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota.connection_quotas import MAX_LOOKED_AT, ConnectionQuotas, ConnectionRejected
from proxy.quota.entities import (
    CONNECTION_RATE,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    MAX_CONNECTIONS,
    ClientIdentity,
)
from proxy.quota.rules import QuotaManagerSettings, Rule


class ConnectionWorld(QuotaWorld):
    """Connections under rules."""

    def open_quotas(self, settings, **listeners):
        super().open_quotas(settings, **listeners)
        self.connections = ConnectionQuotas(self.quotas)

    def enter(self, client_id="c", user=None, before=None):
        identity = ClientIdentity("default", user, client_id)
        return self.connections.enter(identity, before, self.now_ms)

    def refused(self, client_id="c", user=None, before=None):
        with pytest.raises(ConnectionRejected) as refused:
            self.enter(client_id, user, before)
        return refused.value

    def update(self, *rules, **settings):
        self.quotas.update(QuotaManagerSettings(rules=rules, **settings))

    def settle(self):
        return len(list(self.connections.settling()))


def most(bound, **keys):
    return Rule(bounds={MAX_CONNECTIONS: bound}, **keys)


def paced(rate, **keys):
    return Rule(bounds={CONNECTION_RATE: rate}, **keys)


def test_a_connection_beyond_the_number_is_refused_until_one_goes():
    world = ConnectionWorld(most(2, client_id="c"))
    first, _ = world.enter()
    second, _ = world.enter()
    error = world.refused()
    assert error.reason == "too_many_connections_of_client"
    assert str(error) == "client-id=c has 2 connections, 2 are its max_connections by rule 0"
    assert world.enter("other")[1] == 0.0
    world.connections.leave(first)
    world.connections.leave(first)
    third, _ = world.enter()
    world.refused()
    for place in (second, third):
        world.connections.leave(place)
    assert world.connections.counts == {}


class Crowd:
    """Connections of one client id from several addresses, of which some are idle."""

    def __init__(self, bound):
        self.world = ConnectionWorld(most(bound, client_id="c"))
        self.open = {}
        self.numbers = iter(range(1000))

    def come(self, address, *, is_idle=True):
        """Return the number of a connection, or None when it is refused."""
        number, quotas = next(self.numbers), self.world.connections

        def give_way():
            if is_idle:
                quotas.leave(self.open.pop(number)[1])
            return is_idle

        identity = ClientIdentity("default", None, "c")
        try:
            place, _ = quotas.enter(identity, None, 0.0, address, give_way)
        except ConnectionRejected:
            return None
        self.open[number] = address, place
        return number

    def counts(self):
        return Counter(address for address, _ in self.open.values())


def test_the_oldest_idle_one_of_the_address_with_most_gives_way():
    crowd = Crowd(4)
    for number in range(4):
        crowd.come("stranger", is_idle=number > 0)
    assert crowd.come("own") == 4
    assert set(crowd.open) == {0, 2, 3, 4}
    assert crowd.come("own") is not None
    assert crowd.counts() == {"stranger": 2, "own": 2}
    assert crowd.come("own") is crowd.come("stranger") is None
    assert crowd.come("third") is not None, "it has none, another two"
    assert sum(crowd.counts().values()) == 4


def test_none_that_is_busy_gives_way():
    crowd = Crowd(2)
    for _ in range(2):
        crowd.come("stranger", is_idle=False)
    assert crowd.come("own") is None


def test_none_gives_way_where_a_rule_was_lowered():
    crowd = Crowd(4)
    for _ in range(4):
        crowd.come("stranger")
    crowd.world.update(most(2, client_id="c"))
    crowd.world.settle()
    assert crowd.come("own") is None
    assert crowd.counts() == {"stranger": 4}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60))
def test_an_address_gets_what_it_may_have_however_many_come(comers):
    crowd = Crowd(6)
    for address, is_idle in comers:
        had = crowd.counts()
        came = crowd.come(address, is_idle=is_idle) is not None
        now = crowd.counts()
        assert sum(now.values()) == min(sum(had.values()) + came, 6)
        for each in had:  # who gave way had more than the one that came has then
            assert now[each] >= had[each] or (each != address and now[each] >= now[address])
    for _, place in crowd.open.values():
        crowd.world.connections.leave(place)
    crowd.open.clear()
    assert crowd.world.connections.counts == {}
    for _ in range(6):  # nobody who has left is asked to give way
        crowd.come("a")
    assert crowd.come("e") is not None
    assert crowd.counts() == {"a": 5, "e": 1}


def test_a_shared_rule_counts_all_its_clients_together_another_each():
    world = ConnectionWorld(
        most(2, client_id_prefix="batch-", scope="shared", number=1), most(1, client_id=DEFAULT)
    )
    world.enter("batch-1")
    world.enter("batch-2")
    assert "client-id-prefix=batch- has 2" in str(world.refused("batch-3"))
    world.enter("a")
    world.enter("b")
    world.refused("a")


def test_the_first_rule_that_says_so_decides_as_with_every_quota():
    alice = Rule(user="alice", bounds={CONSUMER_BYTE_RATE: 1.0})
    world = ConnectionWorld(alice, most(1, client_id="c", number=1))
    world.enter(user="alice")
    world.refused(user="alice")


def test_one_whose_user_shows_later_counts_for_the_user_only():
    world = ConnectionWorld(most(1, user="alice"), most(1, client_id="c", number=1))
    assert world.connections.depends_on_user
    place, _ = world.enter()
    place, _ = world.enter(user="alice", before=place)
    assert world.connections.counts == {"user=alice": 1}
    other, _ = world.enter()
    world.refused(user="alice", before=other)
    assert world.connections.counts == {"user=alice": 1, "client-id=c": 1}
    same, _ = world.enter(user="bob", before=other)  # whose rule is the same as before
    assert same.counted_as == "client-id=c"
    for each in (place, same):
        world.connections.leave(each)
    assert world.connections.counts == {}


def test_without_a_rule_by_user_a_login_changes_nothing():
    assert not ConnectionWorld(most(1, client_id="c")).connections.depends_on_user
    by_user = Rule(user="alice", bounds={CONSUMER_BYTE_RATE: 1.0})
    assert not ConnectionWorld(by_user).connections.depends_on_user
    assert ConnectionWorld(paced(1, user=DEFAULT)).connections.depends_on_user


def test_a_rule_that_comes_later_counts_who_is_there_and_closes_nobody():
    world = ConnectionWorld()
    places = [world.enter()[0] for _ in range(5)]
    assert world.connections.counts == {}
    world.update(most(3, client_id="c"))
    assert world.settle() == 5
    assert world.connections.counts == {"client-id=c": 5}
    world.refused()
    for place in places[:3]:
        world.connections.leave(place)
    places.append(world.enter()[0])
    world.refused()
    world.update(most(3, client_id=DEFAULT, scope="shared"))
    steps = world.connections.settling()
    next(steps)
    world.connections.leave(places.pop())
    assert len(list(steps)) <= 3
    assert world.connections.counts == {"client-id=<default>": len(places[3:])}
    world.update()
    world.settle()
    assert world.connections.counts == {}
    assert world.settle() == 0


def test_connections_above_the_rate_wait_in_turn():
    world = ConnectionWorld(paced(10, client_id="c"))
    assert [world.enter()[1] for _ in range(14)] == pytest.approx([0.0] * 10 + [100, 200, 300, 400])
    world.now_ms += 1000.0
    assert world.enter()[1] == 0.0
    assert world.enter("other")[1] == 0.0


def test_below_one_a_second_one_comes_at_once():
    world = ConnectionWorld(paced(0.5, client_id="c"))
    assert [world.enter()[1] for _ in range(3)] == [0.0, 2000.0, 4000.0]


def test_one_that_would_wait_for_too_long_is_refused_and_costs_nothing():
    world = ConnectionWorld(paced(1, client_id="c"), max_delay_ms=2000.0)
    assert [world.enter()[1] for _ in range(3)] == [0.0, 1000.0, 2000.0]
    errors = [world.refused() for _ in range(3)]
    assert errors[0].reason == "connection_rate"
    assert "wait for 2 s, for its connection_rate of 1 per second by rule 0" in str(errors[0])
    world.now_ms += 1000.0
    assert world.enter()[1] == 2000.0


def test_a_reconnect_does_not_begin_the_rate_anew():
    world = ConnectionWorld(paced(1, client_id="c"))
    waits = []
    for _ in range(3):
        place, wait_ms = world.enter()
        world.connections.leave(place)
        waits.append(wait_ms)
    assert waits == [0.0, 1000.0, 1000.0], "who leaves before its turn gives that back"
    world.now_ms += 1000.0
    assert world.enter()[1] == 1000.0


def test_who_connects_and_closes_all_the_time_keeps_nobody_out():
    world = ConnectionWorld(paced(10, client_id="c"))
    strangers = [world.enter()[0] for _ in range(210)]
    world.refused()
    for stranger in strangers[::-1]:
        world.connections.leave(stranger)
        world.now_ms += 1.0
    assert [world.enter()[1] for _ in range(2)] == pytest.approx([90.0, 190.0])


def test_a_turn_that_is_given_back_is_the_next_one_that_is_free():
    world = ConnectionWorld(paced(1, client_id="c"))
    _, _, gone, _ = (world.enter()[0] for _ in range(4))
    world.connections.leave(gone)
    assert [world.enter()[1] for _ in range(2)] == [2000.0, 4000.0]


def test_a_higher_rate_helps_at_once_and_a_lower_one_makes_nothing_of_before_longer():
    def update(rate):
        world.update(paced(rate, client_id="c"))
        return world

    world = ConnectionWorld(paced(0.001, client_id="c"))
    place, wait_ms = world.enter()
    assert wait_ms == 0.0
    world.refused()
    assert [update(1000).enter()[1] for _ in range(999)] == [0.0] * 999
    assert world.enter()[1] == pytest.approx(1.0)
    assert update(0.1).enter()[1] == pytest.approx(1001.0)
    world.connections.leave(place)


def test_who_waits_does_so_by_the_rate_of_now():
    world = ConnectionWorld(paced(1, client_id="c"))
    places = [world.enter()[0] for _ in range(11)]

    def still(place):
        return world.connections.still_ms(place, world.now_ms)

    world.pass_ms(500.0)
    assert [still(place) for place in places[1:3]] == [500.0, 1500.0]
    world.update(paced(2, client_id="c"))
    assert [still(place) for place in places] == [0.0, 0.0] + [n * 500.0 + 250 for n in range(9)]
    assert world.enter()[1] == 9 * 500.0 + 250
    world.update(paced(0.5, client_id="c"))
    assert still(places[2]) == 1500.0
    world.update()
    assert still(places[10]) == 0.0


def test_a_login_that_changes_no_rule_is_no_second_connection():
    world = ConnectionWorld(paced(1, client_id="c"), paced(1, user="alice", number=1))
    place, first_ms = world.enter()
    place, again_ms = world.enter(user="bob", before=place)
    place, alice_ms = world.enter(user="alice", before=place)
    assert (first_ms, again_ms, alice_ms) == (0.0, 0.0, 0.0)
    assert world.enter(user="alice")[1] == world.enter()[1] == 1000.0


def test_client_ids_without_end_share_a_rate_and_keep_no_memory():
    world = ConnectionWorld(paced(0.001, client_id=DEFAULT), max_client_entities=3)
    for number in range(3):
        assert world.enter(f"c{number}")[1] == 0.0
    assert world.enter("c3")[1] == 0.0
    assert world.refused("c4").reason == "connection_rate"
    assert str(world.refused("c5")).startswith("other has connections")
    world.refused("c1")
    world.now_ms += 1_000_001.0
    for new in ("c6", "c7", "c8"):
        assert world.enter(new)[1] == 0.0
    assert world.enter("c9")[1] == 0.0
    assert str(world.refused("c10")).startswith("other has connections"), "there is no more room"


def test_few_are_looked_at_for_room():
    world = ConnectionWorld(paced(0.001, client_id=DEFAULT), max_client_entities=2 * MAX_LOOKED_AT)
    for age in ("old", "young"):
        for number in range(MAX_LOOKED_AT):
            world.enter(f"{age}-{number}")
        world.now_ms += 400_000.0
    world.enter("new")  # the old ones are looked at, and come last then
    world.now_ms += 200_001.0  # their schedules are over
    assert str(world.refused("new")).startswith("other has connections")
    for number in range(MAX_LOOKED_AT - 1):  # the others have a place, too
        assert world.enter(f"new-{number}")[1] == 0.0
    assert str(world.refused("new")).startswith("other has connections")


@given(
    st.floats(0.2, 50.0),
    st.lists(
        st.tuples(st.floats(0.0, 3000.0), st.integers(1, 30), st.sets(st.integers(0, 40))),
        max_size=30,
    ),
)
def test_no_time_has_more_than_the_rate_and_a_second(rate, waves):
    """What is let in within any time T is at most the rate times T and what may come at once."""
    world = ConnectionWorld(paced(rate, client_id="c"))
    entered, waiting = [], []
    for pause_ms, count, leaving in waves:
        world.now_ms += pause_ms
        for number in sorted(leaving, reverse=True):
            if number < len(waiting) and waiting[number][0] > world.now_ms:
                entered.remove(waiting[number][0])
                world.connections.leave(waiting.pop(number)[1])
        for _ in range(count):
            try:
                place, wait_ms = world.enter()
                entered.append(world.now_ms + wait_ms)
                waiting.append((entered[-1], place))
            except ConnectionRejected:
                break
    entered.sort()
    at_once = max(rate, 1.0)
    for first, begin_ms in enumerate(entered):
        for last in range(first, len(entered)):
            most_now = at_once + rate * (entered[last] - begin_ms) / 1000 + 1e-6
            assert last - first + 1 <= most_now + 1


@given(st.data())
def test_counts_are_those_of_the_places(data):
    """Whatever comes, goes, logs in or changes: the counts are what a recount gives."""
    keys = ({"client_id": "a"}, {"client_id": DEFAULT}, {"user": "u"}, {"client_id_prefix": "b"})
    scopes = st.sampled_from(["each", "shared"])
    rules = st.lists(st.sampled_from(keys), unique_by=str).flatmap(
        lambda chosen: st.tuples(*(scopes.map(lambda s, k=k: k | {"scope": s}) for k in chosen))
    )
    world, places = ConnectionWorld(), []
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["enter", "move", "leave", "update"]))
        who = (
            data.draw(st.sampled_from(["a", "b1", "b2", "c"])),
            data.draw(st.sampled_from([None, "u"])),
        )
        if action == "update":
            chosen = data.draw(rules)
            world.update(*(most(4, number=n, **rule) for n, rule in enumerate(chosen)))
            world.settle()
        elif action == "leave" and places:
            world.connections.leave(places.pop())
        else:
            before = places[-1] if action == "move" and places else None
            try:
                place, _ = world.enter(*who, before=before)
            except ConnectionRejected:
                continue
            if before is not None:
                places.pop()
            places.append(place)
        recount = {}
        for place in places:
            match = world.quotas.table.match(MAX_CONNECTIONS, place.identity)
            if match is not None:
                recount[match.entity] = recount.get(match.entity, 0) + 1
        assert world.connections.counts == recount
