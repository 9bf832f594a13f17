"""Rules from three sources: who wins, what is kept, and what the manager is given."""

import asyncio
import json
from collections.abc import Generator
from dataclasses import replace
from types import coroutine
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.at_once import at_once
from parts.quota_world import QuotaWorld

from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.rule_registry import RuleEntry, RuleOrigin, RuleRegistry, make_override
from proxy.quota.rules import Budget, QuotaManagerSettings, QuotaPause, Rule, Share
from proxy.quota.schedules import Schedule
from proxy.quota.values import BadValueError
from proxy.state import MemoryStore, Record, SqliteStore, StateError

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
PRODUCER = QuotaKind.PRODUCER_BYTE_RATE
MB = 1e6
NOON_S = 1_700_000_000.5


def rule(bound=MB, /, number=0, place="", **keys) -> Rule:
    return Rule(**keys, bounds={CONSUMER: bound}, number=number, place=place)


def settings(*rules: Rule, **more) -> QuotaManagerSettings:
    numbered = (
        replace(each, number=number, place=f"f:{number}") for number, each in enumerate(rules)
    )
    return QuotaManagerSettings(rules=tuple(numbered), **more)


FILE = settings(rule(1 * MB, client_id="etl"), rule(2 * MB, client_id=DEFAULT))


class Desk(QuotaWorld):
    """A book with its manager; `reopen` is a restart with the same store."""

    registry_options: ClassVar = {}

    def __init__(self, store=None, file=FILE):
        self.store = store if store is not None else MemoryStore()
        self.reopen(file)

    def reopen(self, file=FILE):
        self.open_quotas(file)
        self.book = RuleRegistry(self.quotas, self.store, file, **self.registry_options)

    def put(self, *args, **more):
        return at_once(self.book.put(make_override(*args, **more)))

    def delete(self, keys):
        return at_once(self.book.delete(keys))

    def use_file(self, file):
        at_once(self.book.use_file(file))

    def use_kafka(self, rules):
        at_once(self.book.use_kafka(rules))

    def listed(self):
        return [
            (entry.rule.selector, str(entry.source), entry.in_force)
            for entry in self.book.composed.entries
        ]

    def bound(self, client_id, kind=CONSUMER):
        match = self.quotas.table.match(kind, ClientIdentity("l", None, client_id))
        return match.rule.bounds[kind] if match else None


def test_the_rules_of_the_file_are_in_force_without_anything_else():
    desk = Desk()
    assert desk.quotas.settings == FILE
    assert desk.listed() == [("client-id=etl", "file", True), ("client-id=<default>", "file", True)]
    assert [entry.by for entry in desk.book.composed.entries] == [None, None]


def test_an_override_replaces_the_rule_with_the_same_keys_until_it_is_deleted():
    desk = Desk()
    made = desk.put({"client-id": "etl"}, {CONSUMER: 5 * MB}, "shared", "ann", NOON_S)
    assert (made.source, made.by, made.at_s, made.in_force) == (
        RuleOrigin.OVERRIDE,
        "ann",
        NOON_S,
        True,
    )
    assert (made.rule.scope, made.rule.title) == ("shared", "rule 2 (override by ann)")
    assert desk.bound("etl") == 5 * MB
    assert desk.listed() == [
        ("client-id=etl", "override", True),
        ("client-id=etl", "file", False),
        ("client-id=<default>", "file", True),
    ]
    assert desk.book.composed.entries[0] == made
    assert len(desk.quotas.settings.rules) == 2
    assert desk.delete({"client-id": "etl"})
    assert desk.bound("etl") == 1 * MB
    assert desk.quotas.settings == FILE
    assert not desk.delete({"client-id": "etl"})


def test_an_override_can_add_a_rule():
    desk = Desk()
    desk.put({"client-id-prefix": "e"}, {CONSUMER: 9 * MB})
    assert (desk.bound("etl"), desk.bound("else"), desk.bound("c")) == (1 * MB, 9 * MB, 2 * MB)
    assert not desk.delete({"client-id": "etl"})
    assert desk.bound("etl") == 1 * MB


def test_an_override_takes_all_bounds_of_the_rule_it_replaces():
    both = Rule(client_id="etl", bounds={CONSUMER: MB, PRODUCER: MB})
    desk = Desk(file=settings(both))
    desk.put({"client-id": "etl"}, {CONSUMER: 2 * MB})
    assert (desk.bound("etl"), desk.bound("etl", PRODUCER)) == (2 * MB, None)


def test_what_is_expected_of_a_client_outlives_an_override():
    expected = replace(rule(client_id="backfill"), expected=True)
    desk = Desk(file=settings(expected, rule(client_id=DEFAULT)))
    for client_id in ("backfill", DEFAULT):
        desk.put({"client-id": client_id}, {CONSUMER: 5 * MB})
    in_force = {name: entry.rule.expected for name, entry in desk.book.composed.in_force.items()}
    assert in_force == {"client-id=backfill": True, f"client-id={DEFAULT}": False}


def test_an_override_is_replaced_by_the_next_with_its_keys_in_any_order():
    desk = Desk()
    desk.put({"user": "u", "client-id": "c"}, {CONSUMER: 1.0}, by="ann")
    desk.put({"client-id": "c", "user": "u"}, {CONSUMER: 2.0}, by="bob")
    (made,) = (entry for entry in desk.book.composed.entries if entry.source is RuleOrigin.OVERRIDE)
    assert (made.by, made.rule.bounds[CONSUMER]) == ("bob", 2.0)
    assert len(desk.store.items("")) == 1


def test_the_history_of_a_sensor_outlives_an_override():
    desk = Desk()
    client = desk.quotas.client(ClientIdentity("l", None, "etl"))
    client.charge(CONSUMER, 9 * MB, 0.0)
    desk.put({"client-id": "etl"}, {CONSUMER: 2 * MB})
    assert client.charge(CONSUMER, 10 * MB, 1.0) is None
    (row,) = desk.rows(1.0)
    assert row.rate == pytest.approx(1.9 * MB, rel=0.001)
    assert row.bound == 2 * MB


def test_overrides_survive_a_restart(tmp_path):
    desk = Desk(SqliteStore(tmp_path / "state.db"))
    desk.put({"client-id": "a,b=é"}, {CONSUMER: 3 * MB, PRODUCER: 1}, "shared", "ann", NOON_S)
    desk.put({"user": DEFAULT}, {CONSUMER: 4 * MB})
    desk.put({"user": "gone"}, {CONSUMER: 4 * MB})
    desk.delete({"user": "gone"})
    before = desk.book.composed.entries
    desk.store.close()
    desk.store = SqliteStore(tmp_path / "state.db")
    desk.reopen()
    assert desk.book.composed.entries == before
    assert desk.bound("a,b=é") == 3 * MB
    desk.store.close()


def test_overrides_are_kept_in_another_store_from_then_on():
    desk = Desk()
    desk.put({"client-id": "etl"}, {CONSUMER: 3 * MB}, by="anna", at_s=NOON_S)
    before, desk.store = desk.book.composed.entries, MemoryStore()
    other = Desk(desk.store)
    other.put({"client-id": "of-another-proxy"}, {CONSUMER: MB})
    at_once(other.book.pause(QuotaPause({}, NOON_S)))
    at_once(desk.book.use_store(desk.store))
    assert desk.book.composed.entries == before
    desk.put({"client-id": "new"}, {CONSUMER: 4 * MB})
    before = desk.book.composed.entries
    desk.reopen()
    assert desk.book.composed.entries == before
    assert desk.book.pauses() == []


def test_a_reload_swaps_the_rules_of_the_file_and_keeps_the_others():
    desk = Desk()
    desk.put({"client-id": "etl"}, {CONSUMER: 5 * MB})
    desk.use_kafka([rule(7 * MB, client_id="k")])
    desk.use_file(settings(rule(3 * MB, client_id=DEFAULT), max_delay_ms=5.0))
    assert desk.quotas.settings.max_delay_ms == 5.0
    assert [desk.bound(client_id) for client_id in ("etl", "k", "c")] == [5 * MB, 7 * MB, 3 * MB]
    desk.delete({"client-id": "etl"})
    assert desk.bound("etl") == 3 * MB


def test_overrides_beat_the_cluster_and_the_cluster_beats_the_file():
    desk = Desk()
    desk.use_kafka([rule(7 * MB, client_id="etl")])
    assert desk.bound("etl") == 7 * MB
    desk.put({"client-id": "etl"}, {CONSUMER: 5 * MB})
    assert desk.bound("etl") == 5 * MB
    assert desk.listed()[:3] == [
        ("client-id=etl", "override", True),
        ("client-id=etl", "kafka", False),
        ("client-id=etl", "file", False),
    ]
    desk.use_kafka([])
    desk.delete({"client-id": "etl"})
    assert desk.bound("etl") == 1 * MB


def test_rules_of_the_cluster_that_are_the_same_as_before_disturb_nobody():
    desk = Desk()
    desk.use_kafka([rule(7 * MB, client_id="k")])
    generation = desk.quotas.generation
    desk.use_kafka([rule(7 * MB, client_id="k")])
    assert desk.quotas.generation == generation


@coroutine
def a_step() -> Generator[None, None, None]:
    yield


async def in_two_steps(compose):
    """Compose rules after a step in which other things are done."""
    await a_step()
    return compose()


class BusyDesk(Desk):
    """A desk whose rules take a while to compose; `begin` a change, and end it by `at_once`."""

    registry_options: ClassVar = {"elsewhere": in_two_steps}

    def begin(self, change):
        change.send(None)
        return change


def test_a_client_that_connects_while_rules_are_composed_has_the_ones_before_until_then():
    desk = BusyDesk()
    early = desk.client_quotas("etl")
    early.charge(CONSUMER, 9 * MB, 0.0)
    reload = desk.begin(desk.book.use_file(settings(rule(2 * MB, client_id="etl"))))
    late = desk.client_quotas("late")
    assert [desk.bound("etl"), desk.bound("late")] == [1 * MB, 2 * MB]
    assert late.charge(CONSUMER, 9 * MB, 1.0) is None
    early.charge(CONSUMER, 10 * MB, 1.0)
    at_once(reload)
    assert not late.is_bounded
    sum(desk.quotas.settling())
    assert [each.client_id for each in desk.quotas.unbounded()] == ["late"]
    early.charge(CONSUMER, 0.0, 2.0)
    (row,) = (each for each in desk.rows(2.0) if each.entity == "client-id=etl")
    assert row.rate == pytest.approx(1.9 * MB, rel=0.001)
    assert row.bound == 2 * MB


def test_an_override_that_is_set_while_a_file_is_loaded_is_in_force_with_it():
    desk = BusyDesk()
    reload = desk.begin(desk.book.use_file(settings(rule(3 * MB, client_id=DEFAULT))))
    override = desk.begin(desk.book.put(make_override(ETL, {CONSUMER: 5 * MB})))
    at_once(reload)
    assert [desk.bound("etl"), desk.bound("c")] == [3 * MB, 3 * MB]
    assert at_once(override).in_force
    assert [desk.bound("etl"), desk.bound("c")] == [5 * MB, 3 * MB]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_changes_the_later_one_counts_whichever_is_composed_first(order):
    desk = BusyDesk()
    changes = [
        desk.begin(desk.book.use_file(settings(rule(bound * MB, client_id="c"))))
        for bound in (3, 4)
    ]
    for number in order:
        at_once(changes[number])
    assert desk.bound("c") == 4 * MB


class SlowBusyDesk(BusyDesk):
    """A desk whose store takes a while to write, and whose rules take one to compose."""

    registry_options: ClassVar = {"elsewhere": in_two_steps, "writing": in_two_steps}


@pytest.mark.parametrize("kind", [BusyDesk, SlowBusyDesk])
def test_a_cancelled_override_is_in_force_as_it_is_kept_whatever_is_composed_meanwhile(kind):
    """The request ends while its rules are composed, or while it is written."""
    desk = kind()
    earlier = desk.begin(desk.book.use_file(settings(rule(3 * MB, client_id="etl"))))
    override = desk.begin(desk.book.put(make_override(ETL, {CONSUMER: 5 * MB})))
    with pytest.raises(asyncio.CancelledError):
        override.throw(asyncio.CancelledError)
    assert desk.bound("etl") == 5 * MB
    at_once(earlier)
    assert desk.bound("etl") == 5 * MB


class SlowDesk(Desk):
    """A desk whose store takes a while to write."""

    registry_options: ClassVar = {"writing": in_two_steps}


def test_clients_are_served_while_an_override_is_written_which_is_in_force_only_then():
    desk = SlowDesk()
    override = desk.book.put(make_override(ETL, {CONSUMER: 5 * MB}))
    override.send(None)
    assert desk.bound("etl") == 1 * MB
    assert desk.store.items("") == []
    at_once(override)
    assert desk.bound("etl") == 5 * MB
    assert len(desk.store.items("")) == 1


async def test_changes_that_overlap_while_they_are_written_are_all_kept():
    desk, lock = Desk(), asyncio.Lock()

    async def in_thread(write):
        async with lock:
            return await asyncio.to_thread(write)

    desk.book = RuleRegistry(desk.quotas, desk.store, FILE, writing=in_thread)
    names = [{"client-id": f"c{number}"} for number in range(5)]
    await asyncio.gather(
        *(desk.book.put(make_override(each, {CONSUMER: 5 * MB})) for each in names)
    )
    await asyncio.gather(*(desk.book.delete(each) for each in names[:2]))
    assert [desk.bound(f"c{number}") for number in range(5)] == [2 * MB] * 2 + [5 * MB] * 3
    assert len(desk.store.items("")) == 3


def test_an_override_whose_request_is_cancelled_while_it_is_written_is_in_force():
    desk = SlowDesk()
    override = desk.book.put(make_override(ETL, {CONSUMER: 5 * MB}))
    override.send(None)
    with pytest.raises(asyncio.CancelledError):
        override.throw(asyncio.CancelledError)
    assert desk.bound("etl") == 5 * MB


def test_an_override_that_goes_while_it_is_composed_was_made_all_the_same():
    desk = BusyDesk()
    override = desk.begin(desk.book.put(make_override(ETL, {CONSUMER: 5 * MB})))
    deleted = desk.begin(desk.book.delete(ETL))
    assert at_once(deleted)
    assert at_once(override).rule.bounds[CONSUMER] == 5 * MB
    assert desk.bound("etl") == 1 * MB


ETL = {"client-id": "etl"}


@pytest.mark.parametrize(
    ("keys", "bounds", "more", "message"),
    [
        ({}, {CONSUMER: 1.0}, {}, "fits no client: it has no key"),
        ({"partition": "0"}, {CONSUMER: 1.0}, {}, '"partition" is not known here'),
        ({"topic": "a b"}, {CONSUMER: 1.0}, {}, 'topic: "a b" is no name of a topic'),
        (
            {"topic": "t"},
            {QuotaKind.REQUEST_PERCENTAGE: 1.0},
            {},
            "request_percentage is of clients, not of what they read or write, and does not go",
        ),
        ({"user": ""}, {CONSUMER: 1.0}, {}, "user: is empty text"),
        (ETL, {}, {}, "sets no quota: add one of consumer_byte_rate, producer_byte_rate"),
        (ETL, {"byte_rate": 1.0}, {}, '"byte_rate" is not known here: use consumer_'),
        (ETL, {CONSUMER: 0}, {}, "consumer_byte_rate is 0: give a finite number above 0"),
        (ETL, {CONSUMER: -1.0}, {}, "consumer_byte_rate is -1.0: give a finite"),
        (ETL, {CONSUMER: float("nan")}, {}, "consumer_byte_rate is nan"),
        (ETL, {CONSUMER: float("inf")}, {}, "consumer_byte_rate is inf"),
        (ETL, {CONSUMER: 10**400}, {}, "give a finite number above 0"),
        (ETL, {CONSUMER: True}, {}, "consumer_byte_rate is True"),
        (ETL, {CONSUMER: "10MiB"}, {}, "consumer_byte_rate is '10MiB'"),
        (ETL, {CONSUMER: 1.0}, {"scope": "all"}, '"all" is not known here: write each or shared'),
        (ETL, {CONSUMER: 1.0}, {"by": 7}, "who made it is 7, not a name"),
        (ETL, {CONSUMER: 1.0}, {"at_s": float("nan")}, "when it was made is nan, not a time"),
    ],
)
def test_what_makes_no_rule_is_refused_and_changes_nothing(keys, bounds, more, message):
    desk = Desk()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below, as it stands
        desk.put(keys, bounds, **more)
    assert message in str(caught.value)
    assert desk.quotas.settings == FILE
    assert desk.store.items("") == []


class FullDisk(MemoryStore):
    full = False

    def put_many(self, records, *, delete=()):
        if self.full:
            raise StateError("the disk is full", "make room")
        return super().put_many(records, delete=delete)


def test_what_cannot_be_kept_does_not_come_into_force_nor_go():
    desk = Desk(FullDisk())
    desk.put(ETL, {CONSUMER: 5 * MB})
    desk.store.full = True
    with pytest.raises(StateError, match="the disk is full"):
        desk.put(ETL, {CONSUMER: 6 * MB})
    with pytest.raises(StateError, match="the disk is full"):
        desk.delete(ETL)
    assert desk.bound("etl") == 5 * MB


GOOD = {"bounds": {"consumer_byte_rate": 1.0}, "scope": "each", "by": None, "at_s": None}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Record("quotas/user=u", "{", 1), "the value of 'quotas/user=u' in the state is damaged"),
        (Record("quotas/user=u", json.dumps(GOOD), 2), "it has form 2, this version of quota-"),
        (Record.of("quotas/user=u", []), "it lacks bounds, scope, by or at_s"),
        (Record.of("quotas/user=u", {**GOOD, "bounds": 5}), "it lacks bounds, scope, by or at_s"),
        (Record.of("quotas/user=u", {"bounds": {}, "scope": "each"}), "it lacks bounds"),
        (Record.of("quotas/user=u", {**GOOD, "bounds": {"x": 1}}), '"x" is not known here'),
        (
            Record.of("quotas/user=u", {**GOOD, "scope": ["each"]}),
            "a list is not known here: write each or shared",
        ),
        (Record.of("quotas/user=u", {**GOOD, "at_s": "now"}), "when it was made is 'now'"),
        (Record.of("quotas/nonsense", GOOD), "'nonsense' is not KEY=VALUE"),
        (Record.of("quotas/client-id=c,user=u", GOOD), "its name is not written as quota-proxy"),
    ],
)
def test_a_record_that_cannot_be_read_is_reported_and_kept(record, message):
    store = MemoryStore()
    store.put_many([record])
    with pytest.raises(StateError) as caught:
        Desk(store)
    assert message in caught.value.what
    assert repr(record.key) in caught.value.what
    assert "backup" in caught.value.fix
    assert store.items("") == [record]


NAMES = st.sampled_from(["a", "b", DEFAULT])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(1, 9)),
        st.tuples(st.just("delete"), NAMES),
        st.tuples(st.just("file"), st.dictionaries(NAMES, st.integers(1, 9))),
        st.tuples(st.just("kafka"), st.dictionaries(NAMES, st.integers(1, 9))),
        st.tuples(st.just("restart")),
    ),
    max_size=12,
)


@given(STEPS)
def test_any_changes_leave_the_strongest_rule_of_each_key_in_force(steps):
    """Against a model: one dictionary for each source, laid over each other."""
    overrides, kafka, file = {}, {}, {}
    desk = Desk(file=settings())
    for step in steps:
        match step:
            case ("put", name, bound):
                desk.put({"client-id": name}, {CONSUMER: bound})
                overrides[name] = bound
            case ("delete", name):
                removed = overrides.pop(name, None)
                assert desk.delete({"client-id": name}) is (removed is not None)
            case ("file", rules):
                file = rules
                desk.use_file(settings(*(rule(b, client_id=n) for n, b in rules.items())))
            case ("kafka", rules):
                kafka = rules
                desk.use_kafka(rule(b, client_id=n) for n, b in rules.items())
            case _:
                desk.reopen(settings(*(rule(b, client_id=n) for n, b in file.items())))
                kafka = {}
        in_force = {each.client_id: each.bounds[CONSUMER] for each in desk.quotas.settings.rules}
        assert in_force == {**file, **kafka, **overrides}
        assert len(desk.book.composed.entries) == len(overrides) + len(kafka) + len(file)


class SharedDesk(Desk):
    """A registry over a store that another one writes."""

    registry_options: ClassVar = {"writes": False}


def test_what_another_process_wrote_is_in_force_after_a_reread():
    first = Desk()
    second = SharedDesk(first.store)
    first.put({"client-id": "etl"}, {CONSUMER: 7.0})
    at_once(first.book.pause(QuotaPause({"client-id": "other"}, NOON_S)))
    assert len(first.store.items("")) == 2
    assert second.bound("etl") == MB
    at_once(second.book.reread())
    assert second.bound("etl") == 7.0
    assert second.book.pauses() == first.book.pauses()
    generation = second.quotas.generation
    at_once(second.book.reread())
    assert second.quotas.generation == generation
    first.delete({"client-id": "etl"})
    at_once(first.book.resume())
    assert first.store.items("") == []
    at_once(second.book.reread())
    assert (second.bound("etl"), second.book.pauses()) == (MB, [])


def test_one_that_does_not_write_ends_what_is_due_and_leaves_the_store():
    first = Desk()
    second = SharedDesk(first.store)
    first.put({"client-id": "etl"}, {CONSUMER: 7.0}, until_s=NOON_S)
    at_once(first.book.pause(QuotaPause({}, NOON_S)))
    at_once(second.book.reread())
    ended = at_once(second.book.end_due(NOON_S))
    assert [type(each) for each in ended] == [RuleEntry, QuotaPause]
    assert (second.bound("etl"), second.book.pauses()) == (MB, [])
    assert len(first.store.items("")) == 2
    second.book.writes = True  # the one that wrote has died before
    at_once(second.book.reread())
    at_once(second.book.end_due(NOON_S))
    assert first.store.items("") == []


def test_what_ended_by_a_clock_that_was_ahead_is_in_force_again_unless_it_has_ended():
    first = Desk()
    second = SharedDesk(first.store)
    for name in ("etl", "gone"):
        first.put({"client-id": name}, {CONSUMER: 7.0}, until_s=NOON_S)
    at_once(first.book.pause(QuotaPause({}, NOON_S)))
    at_once(second.book.reread())
    for ahead_s in (0, 1):
        at_once(second.book.end_due(NOON_S + ahead_s))
        at_once(second.book.reread())
        assert (second.bound("etl"), second.book.pauses()) == (MB, [])
    first.delete({"client-id": "gone"})
    at_once(second.book.reread())
    assert at_once(second.book.end_due(NOON_S - 1)) == []
    assert (second.bound("etl"), second.bound("gone")) == (7.0, 2 * MB)
    assert second.book.pauses() == first.book.pauses()


def test_one_that_does_not_write_refuses_changes():
    desk = SharedDesk()
    pause = QuotaPause({}, NOON_S)
    for change in (
        lambda: desk.put({"client-id": "etl"}, {CONSUMER: 7.0}),
        lambda: at_once(desk.book.pause(pause)),
    ):
        with pytest.raises(StateError, match="another member"):
            change()
    assert (desk.bound("etl"), desk.book.pauses()) == (MB, [])
    store = MemoryStore()
    at_once(desk.book.use_store(store))
    assert store.items("") == []


def test_an_override_that_cannot_be_read_changes_nothing():
    desk = SharedDesk()
    desk.store.put_many([Record.of("quotas/client-id=etl", {"bounds": 1})])
    with pytest.raises(StateError):
        at_once(desk.book.reread())
    assert desk.bound("etl") == MB


NIGHT = Schedule(("mon-sun",), "22:00", "06:00", "Europe/Berlin")
IN_BUDGET = {"budget": "all"}


def shares(**more) -> QuotaManagerSettings:
    budget = Budget(name="all", bounds={CONSUMER: 9 * MB}, **more)
    inner = Budget(name="adhoc", bounds={}, share=Share(budget, guaranteed=3 * MB), number=1)
    return settings(rule(5 * MB, client_id="etl", share=Share(inner, 2.0, 3 * MB)))


def most(desk: Desk) -> float:
    """The most that etl can have, in MB per second."""
    return (
        desk.quotas.table.match(CONSUMER, ClientIdentity("l", None, "etl")).rule.ceilings[CONSUMER]
        / MB
    )


def test_an_override_of_a_budget_is_its_rate_at_all_times_until_it_ends():
    desk = Desk(file=shares(when=NIGHT))
    at_once(desk.book.end_due(NOON_S - NOON_S % 86_400 + 12 * 3600))
    assert [each.in_force for each in desk.book.composed.budgets] == [True, False]
    assert most(desk) == 5  # of the rule alone
    made = desk.put(IN_BUDGET, {CONSUMER: 4 * MB}, by="anna", until_s=NOON_S + 1e6)
    assert (str(made.source), made.by, made.rule.keys) == ("override", "anna", IN_BUDGET)
    assert [each.rule.bounds for each in desk.book.composed.budgets] == [{}, {CONSUMER: 4 * MB}]
    assert most(desk) == 4
    (etl,) = desk.quotas.table.rules
    assert (etl.share.guaranteed, etl.share.budget.share.guaranteed) == (3 * MB, 3 * MB)
    desk.reopen(shares(when=NIGHT))
    assert most(desk) == 4
    desk.put(IN_BUDGET, {CONSUMER: 4 * MB}, enforce=False, until_s=NOON_S + 1e6)
    assert most(desk) == 5
    at_once(desk.book.end_due(NOON_S + 2e6))
    assert {str(each.source) for each in desk.book.composed.budgets} == {"file"}
    assert most(desk) == 5


@pytest.mark.parametrize(
    ("name", "rate", "problem"),
    [
        ("al", 4 * MB, "no rule's clients are in a budget 'al'"),
        ("all", 2 * MB, "consumer_byte_rate: .* is less than its clients are guaranteed"),
    ],
)
def test_no_override_is_of_a_budget_that_is_not_there_or_guarantees_more(name, rate, problem):
    desk = Desk(file=shares())
    with pytest.raises(BadValueError, match=problem):
        desk.put({"budget": name}, {CONSUMER: rate})
    assert (most(desk), list(desk.store.items(""))) == (5, [])


def test_an_override_of_a_budget_that_is_gone_waits_for_it():
    desk = Desk(file=shares())
    desk.put(IN_BUDGET, {CONSUMER: 4 * MB})
    desk.use_file(FILE)
    assert not desk.book.composed.budgets
    desk.use_file(shares())
    assert most(desk) == 4
