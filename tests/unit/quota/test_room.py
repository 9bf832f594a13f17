"""When there is no room for a new client, sensors make it that are as good as new ones."""

from hypothesis import given
from hypothesis import strategies as st
from parts.quota_world import QuotaWorld

from proxy.quota.entities import CONSUMER_BYTE_RATE, DEFAULT, ClientIdentity
from proxy.quota.gate import FetchSizes
from proxy.quota.meter import Meter
from proxy.quota.meters import ADDRESS_PARTS, MAX_EXAMINED
from proxy.quota.rules import Rule

BOUND = 1_000_000.0
ALL = Rule(client_id=DEFAULT, bounds={CONSUMER_BYTE_RATE: BOUND})
SPAN_MS = 11_000.0
AT_ONCE = 10 * BOUND
"""What a client may take after a quiet time."""


class RoomWorld(QuotaWorld):
    """Clients that come, send something and go."""

    def send(self, client_id, size=1.0, address=None):
        quotas = self.quotas.client(ClientIdentity("default", None, client_id), address)
        charge = quotas.charge(CONSUMER_BYTE_RATE, size, self.now_ms)
        entity = quotas.meters[CONSUMER_BYTE_RATE].entity
        quotas.close()
        return entity, charge.delay_ms if charge is not None else 0

    def flood(self, count, address=None):
        """Return how many of so many new clients get a sensor of their own."""
        self.flooded = getattr(self, "flooded", 0) + count
        ids = (f"flood-{number}" for number in range(self.flooded - count, self.flooded))
        return sum(self.send(each, address=address)[0] != "other" for each in ids)


def test_clients_that_have_gone_quiet_make_room_for_new_ones():
    world = RoomWorld(ALL, max_client_entities=10)
    assert world.flood(12) == 10
    world.now_ms += SPAN_MS - 1.0
    assert world.flood(1) == 0
    world.now_ms += SPAN_MS
    assert world.flood(12) == 10
    assert len(world.sensors) == 10 + 1


def test_no_client_gets_rid_of_what_it_owes_by_new_names():
    world = RoomWorld(ALL, max_client_entities=1)
    world.send("c", 3 * AT_ONCE)
    for _ in range(15):
        world.now_ms += 1000.0
        assert world.flood(3) == 0
    entity, delay_ms = world.send("c", 1.0)
    assert (entity, delay_ms > 1000) == ("client-id=c", True)
    world.now_ms += 60_000.0
    assert world.flood(1) == 0
    assert world.send("c") == ("client-id=c", 0)  # below its bound: the formula decides again
    world.now_ms += SPAN_MS
    assert world.flood(1) == 1
    world.now_ms += SPAN_MS
    assert world.send("c", AT_ONCE / 2) == ("client-id=c", 0)


def test_one_with_a_response_under_way_keeps_its_sensor():
    world = RoomWorld(ALL, max_client_entities=1)
    quotas = world.client_quotas("c")
    quotas.charge(CONSUMER_BYTE_RATE, 1.0, world.now_ms)
    _, expected = quotas.grant(1000, FetchSizes(), world.now_ms, holds=True)
    quotas.close()
    world.now_ms += 2 * SPAN_MS
    assert world.flood(1) == 0
    expected.cancel()
    world.now_ms += 2 * SPAN_MS
    assert world.flood(1) == 1


def test_one_that_is_shown_as_throttled_keeps_its_sensor_until_that_ends():
    world = RoomWorld(ALL, max_client_entities=1)
    quotas = world.client_quotas("c")
    charge = quotas.charge(CONSUMER_BYTE_RATE, 1.1 * AT_ONCE, world.now_ms)
    world.quotas.held(charge, charge.delay_ms, world.now_ms)
    quotas.close()
    world.now_ms += 2 * SPAN_MS
    assert world.flood(1) == 0
    world.now_ms += 60_000.0
    sum(world.quotas.sweeping(world.now_ms))
    world.send("c")
    world.now_ms += SPAN_MS
    assert world.flood(1) == 1


def test_an_address_that_makes_names_up_leaves_the_others_their_places():
    world = RoomWorld(ALL, max_client_entities=10)
    assert world.flood(100, "10.0.0.66") == 10 // ADDRESS_PARTS
    for number in range(5):
        entity, _ = world.send(f"c{number}", address=f"10.0.0.{number}")
        assert entity == f"client-id=c{number}"
    assert world.flood(1, "10.0.0.7") == 0
    world.now_ms += SPAN_MS + 1.0
    assert world.flood(100, "10.0.0.66") == 10 // ADDRESS_PARTS


def test_one_place_is_for_any_address():
    world = RoomWorld(ALL, max_client_entities=1)
    assert world.flood(2, "10.0.0.66") == 1


def test_busy_clients_are_looked_at_once_in_a_while(monkeypatch):
    """Each of them is looked at once in the time that its history lasts, however many come."""
    world = RoomWorld(ALL, max_client_entities=2 * MAX_EXAMINED)
    assert world.flood(2 * MAX_EXAMINED) == 2 * MAX_EXAMINED
    world.now_ms += SPAN_MS - 1.0
    for number in range(2 * MAX_EXAMINED):
        world.send(f"flood-{number}")
    world.now_ms += 2.0
    asked, is_in_use = set(), Meter.is_in_use

    def look(meter, now_ms):
        asked.add(meter.entity)
        return is_in_use(meter, now_ms)

    monkeypatch.setattr(Meter, "is_in_use", look)
    for expected in (MAX_EXAMINED, 2 * MAX_EXAMINED, 2 * MAX_EXAMINED):
        world.send(f"new-{expected}", address="x")
        assert len(asked) == expected
    world.send("new", address="x")
    assert asked == {f"client-id=flood-{number}" for number in range(2 * MAX_EXAMINED)}


@given(
    st.lists(
        st.tuples(st.floats(0.0, 20_000.0), st.floats(1.0, 2 * AT_ONCE), st.booleans()),
        max_size=12,
    )
)
def test_what_is_forgotten_changes_no_hold(steps):
    """A client whose sensor makes room is held as one whose sensor stays."""
    small, large = RoomWorld(ALL, max_client_entities=1), RoomWorld(ALL)
    for pause_ms, size, floods in steps:
        small.now_ms += pause_ms
        large.now_ms += pause_ms
        if floods:
            small.flood(1)
            small.now_ms += SPAN_MS + 1.0
            large.now_ms += SPAN_MS + 1.0
        found = small.send("c", size)
        if found[0] == "other":
            return
        assert found == large.send("c", size)
