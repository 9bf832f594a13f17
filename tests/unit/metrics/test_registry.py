"""Sensors by name: one each, gone when idle."""

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrics import Registry, Sensor

EXPIRY_MS = 1000.0


def create(registry, name, now_ms):
    sensor = Sensor(name)
    sensor.expiry_ms = EXPIRY_MS
    registry.add(sensor, now_ms)
    return sensor


def expire(registry, now_ms):
    """Have idle sensors go; return their names."""
    return [sensor.name for sensor in registry.expiring(now_ms) if sensor is not None]


def test_a_name_stands_for_one_sensor():
    registry = Registry()
    sensor = create(registry, "a", 5)

    assert registry.get("a") is sensor
    assert registry.get("b") is None
    assert sensor.last_record_ms == 5
    assert len(registry) == 1


def test_expire_names_what_went():
    registry = Registry()
    for name in ("a", "b", "c"):
        create(registry, name, 0)
    registry.get("b").record(1, 10)

    assert expire(registry, 999) == []
    assert expire(registry, 1000) == ["a", "c"]
    assert expire(registry, 1000) == []
    assert expire(registry, 1010) == ["b"]
    assert len(registry) == 0


def test_a_name_that_expired_gets_a_new_sensor():
    registry = Registry()
    old = create(registry, "a", 0)
    expire(registry, EXPIRY_MS)
    new = create(registry, "a", EXPIRY_MS)

    assert new is not old
    assert (old.retired, new.retired) == (True, False)
    assert new.expires_ms == 2 * EXPIRY_MS


def test_remove():
    registry = Registry()
    sensor = create(registry, "a", 0)

    assert registry.remove("a") is True
    assert registry.remove("a") is False
    assert sensor.retired
    assert len(registry) == 0


def test_sensors_may_come_and_go_during_iteration():
    registry = Registry()
    for name in ("a", "b", "c"):
        create(registry, name, 0)

    for sensor in registry:
        registry.remove(sensor.name)
        create(registry, sensor.name + "2", 0)

    assert [sensor.name for sensor in registry] == ["a2", "b2", "c2"]


def names(steps):
    return [None if sensor is None else sensor.name for sensor in steps]


def test_each_expires_when_its_own_time_is_up():
    registry = Registry()
    for name in ("a", "b", "c", "d"):
        create(registry, name, 0)
    for name, now_ms in (("a", 30), ("b", 10), ("c", 20)):
        registry.get(name).record(1, now_ms)

    assert names(registry.expiring(1015)) == [None, "b", None, "d"]
    assert names(registry.expiring(1015)) == []
    assert names(registry.expiring(1030)) == ["c", "a"]


def test_expiring_may_be_left_and_the_registry_change_between_its_steps():
    registry = Registry()
    for name in ("a", "b", "c", "d"):
        create(registry, name, 0)
    steps = registry.expiring(EXPIRY_MS)

    assert next(steps).name == "a"
    registry.remove("b")
    registry.get("c").record(1, 500)
    create(registry, "e", EXPIRY_MS)
    assert names(steps) == [None, None, "d"]
    assert [sensor.name for sensor in registry] == ["c", "e"]
    assert expire(registry, 1500) == ["c"]


def test_50_000_names_cost_a_look_each_and_leave_nothing_behind():
    """A new name each millisecond; at any time those of the last second are in use."""
    registry = Registry()
    looks = gone = 0
    for now_ms in range(50_000):
        create(registry, f"client-{now_ms}", now_ms)
        for sensor in registry.expiring(now_ms):
            looks += 1
            gone += sensor is not None
        assert len(registry) <= EXPIRY_MS

    assert looks == gone == 50_000 - EXPIRY_MS
    assert [sensor.name for sensor in registry] == [f"client-{n}" for n in range(49_000, 50_000)]


def test_sensors_in_use_are_looked_at_once_in_an_expiry_time():
    registry = Registry()
    sensors = [create(registry, str(number), 0) for number in range(100)]
    looks = 0
    for now_ms in range(1, 10_000):
        sensors[now_ms % 100].record(1, now_ms)
        looks += len(list(registry.expiring(now_ms)))

    assert len(registry) == 100
    # Each is found in use when the time since its last look is up, at most 100 ms before that.
    assert looks <= 100 * 10_000 / (EXPIRY_MS - 100)


def alive(kind):
    gc.collect()
    return sum(isinstance(each, kind) for each in gc.get_objects())


def test_removed_sensors_do_not_pile_up():
    registry = Registry()
    others = alive(Sensor)
    for number in range(1000):
        create(registry, str(number), 0)
        registry.remove(str(number))

    assert alive(Sensor) - others <= 100


class RegistryAgainstModel(RuleBasedStateMachine):
    """Any order of calls, against a dictionary of the times of the last values."""

    names = st.sampled_from("abcdef")

    def __init__(self):
        super().__init__()
        self.registry = Registry()
        self.now_ms = 0.0
        self.model = {}

    def idle(self):
        return {name for name, at_ms in self.model.items() if self.now_ms - at_ms >= EXPIRY_MS}

    @rule(step_ms=st.sampled_from([1, 250, 500, 999, 1000, 3000]))
    def wait(self, step_ms):
        self.now_ms += step_ms

    @rule(name=names)
    def add(self, name):
        if name not in self.model:
            create(self.registry, name, self.now_ms)
            self.model[name] = self.now_ms

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def record(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.registry.get(name).record(1, self.now_ms)
        self.model[name] = self.now_ms

    @rule(name=names)
    def remove(self, name):
        assert self.registry.remove(name) is (self.model.pop(name, None) is not None)

    @rule()
    def expire(self):
        idle = self.idle()
        assert set(expire(self.registry, self.now_ms)) == idle
        for name in idle:
            del self.model[name]

    @invariant()
    def same_sensors(self):
        assert {sensor.name for sensor in self.registry} == set(self.model)
        assert len(self.registry) == len(self.model)


TestRegistryAgainstModel = RegistryAgainstModel.TestCase
TestRegistryAgainstModel.settings = settings(deadline=None)
