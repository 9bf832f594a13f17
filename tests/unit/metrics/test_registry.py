"""Sensors by name: one each."""

import gc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from metrics import Registry, Sensor


def create(registry, name, now_ms):
    sensor = Sensor(name)
    registry.add(sensor, now_ms)
    return sensor


def test_a_name_stands_for_one_sensor():
    registry = Registry()
    sensor = create(registry, "a", 5)

    assert registry.get("a") is sensor
    assert registry.get("b") is None
    assert sensor.last_record_ms == 5
    assert len(registry) == 1


def test_remove():
    registry = Registry()
    sensor = create(registry, "a", 0)

    registry.remove("a")
    assert sensor.retired
    assert registry.get("a") is None
    assert len(registry) == 0
    new = create(registry, "a", 1)
    assert (new.retired, registry.get("a")) == (False, new)


def test_sensors_may_come_and_go_during_iteration():
    registry = Registry()
    for name in ("a", "b", "c"):
        create(registry, name, 0)

    for sensor in registry:
        registry.remove(sensor.name)
        create(registry, sensor.name + "2", 0)

    assert [sensor.name for sensor in registry] == ["a2", "b2", "c2"]


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

    @rule(step_ms=st.sampled_from([1, 250, 3000]))
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

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        name = data.draw(st.sampled_from(sorted(self.model)))
        self.registry.remove(name)
        del self.model[name]

    @invariant()
    def same_sensors(self):
        found = {sensor.name: sensor.last_record_ms for sensor in self.registry}
        assert found == self.model
        assert len(self.registry) == len(self.model)


TestRegistryAgainstModel = RegistryAgainstModel.TestCase
TestRegistryAgainstModel.settings = settings(deadline=None)
