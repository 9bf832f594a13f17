"""Pauses: whose quotas are not enforced, that it ends, and that nobody else is concerned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.at_once import at_once
from parts.quota_world import QuotaWorld

from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.rule_registry import MAX_PAUSES, OVERRIDES, PAUSES, RuleRegistry, make_override
from proxy.quota.rules import QuotaManagerSettings, QuotaPause, Rule, RuleTable, rule_mismatch
from proxy.state import MemoryStore, Record, StateError

CONSUMER, PRODUCER, *_ = QuotaKind
MB = 1_000_000
NOON_S = 1_790_000_000.0
HOUR_S = 3600.0

names = st.sampled_from(["a", "ab", "b"])
keys = st.fixed_dictionaries(
    {},
    optional={
        "user": st.sampled_from(["a", "b", DEFAULT]),
        "listener": st.sampled_from(["l", "m"]),
    },
).flatmap(
    lambda some: st.sampled_from(
        [
            some,
            *({**some, "client-id": name} for name in ("a", "ab", DEFAULT)),
            *({**some, "client-id-prefix": name} for name in ("a", "ab")),
        ]
    )
)
clients = st.builds(ClientIdentity, st.sampled_from(["l", "m"]), st.none() | names, names)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    chosen = draw(keys.filter(bool))
    named = {key.replace("-", "_"): value for key, value in chosen.items()}
    return Rule(**named, scope=draw(st.sampled_from(["each", "shared"])), bounds={CONSUMER: MB})


@given(keys.filter(bool), clients)
def test_a_pause_is_for_the_same_clients_as_a_rule_with_its_keys(asked, client):
    named = {key.replace("-", "_"): value for key, value in asked.items()}
    rule = Rule(**named, bounds={CONSUMER: MB})
    assert QuotaPause(asked, 0.0).fits(client) is (rule_mismatch(rule.keys, client) is None)


@given(clients)
def test_a_pause_without_keys_is_for_every_client(client):
    assert QuotaPause({}, 0.0).fits(client)


@given(st.lists(rules(), max_size=4), st.lists(keys, max_size=3), st.lists(clients, max_size=8))
def test_no_entity_is_held_for_some_of_its_clients_only(some, paused, connected):
    pauses = [QuotaPause(each, 0.0) for each in paused]
    table, open_table = RuleTable(some, pauses=pauses), RuleTable(some)
    enforced: dict[tuple[int, str], bool] = {}
    for client in connected:
        match, before = table.match(CONSUMER, client), open_table.match(CONSUMER, client)
        assert (match is None) is (before is None)
        if match is None or before is None:
            continue
        assert match.rule is before.rule
        assert match.enforced is not any(pause.fits(client) for pause in pauses)
        assert not match.enforced or match.entity == before.entity, "who is held stays where it is"
        sensor = id(match.rule), match.entity
        assert enforced.setdefault(sensor, match.enforced) is match.enforced


class PauseWorld(QuotaWorld):
    """A registry and its store; `reopen` is a restart."""

    def __init__(self, *file: Rule, store=None, **settings):
        self.file = QuotaManagerSettings(rules=file, **settings)
        self.store = store or MemoryStore()
        self.reopen()

    def reopen(self):
        self.open_quotas(self.file)
        self.registry = RuleRegistry(self.quotas, self.store, self.file)

    def pause(self, until_s=NOON_S + HOUR_S, **asked):
        pause = QuotaPause(
            {key.replace("_", "-"): value for key, value in asked.items()}, until_s, "anna", NOON_S
        )
        at_once(self.registry.pause(pause))
        return pause

    def resume(self, asked=None):
        return at_once(self.registry.resume(asked))

    def end_due(self, now_s):
        return at_once(self.registry.end_due(now_s))

    @property
    def gauge(self):
        return self.prometheus.get_sample_value("kafka_quota_proxy_throttling_paused")

    def is_held(self, client_id, now_ms=0.0):
        client = self.client_quotas(client_id)
        client.charge(CONSUMER, 100 * MB, now_ms)
        return client.owed_ms(CONSUMER, now_ms) > 0


ALL = Rule(client_id=DEFAULT, bounds={CONSUMER: MB})
SHARED = Rule(client_id_prefix="r-", scope="shared", bounds={CONSUMER: MB}, number=1)


def test_all_are_let_through_and_held_again():
    world = PauseWorld(ALL, SHARED)
    assert world.gauge == 0
    made = world.pause()
    assert (world.gauge, world.registry.pauses()) == (1, [made])
    assert not any(map(world.is_held, ("a", "b", "r-1", "r-2")))
    assert {row.entity for row in world.rows(0.0)} == {
        "client-id=a",
        "client-id=b",
        "client-id-prefix=r-",
    }
    assert world.resume() == [made]
    assert (world.gauge, world.registry.pauses(), world.resume()) == (0, [], [])
    assert all(map(world.is_held, ("a", "b", "r-1", "r-2")))


def test_one_client_is_let_through():
    world = PauseWorld(ALL)
    made = world.pause(client_id="a")
    assert not world.is_held("a")
    assert world.is_held("b")
    assert world.resume({"client-id": "b"}) == []
    assert world.resume({"client-id": "a"}) == [made]
    assert world.is_held("a")


def test_a_client_of_a_shared_rule_is_let_through_and_does_not_count_for_the_others():
    world = PauseWorld(SHARED)
    world.pause(client_id="r-1")
    for at_ms in range(0, 10_000, 1000):
        assert world.client_quotas("r-1").charge(CONSUMER, 100 * MB, float(at_ms)) is None
        assert world.client_quotas("r-2").charge(CONSUMER, MB / 2, float(at_ms)) is None
    rows = {row.entity: row for row in world.rows(9000.0)}
    assert set(rows) == {"client-id-prefix=r-,paused", "client-id-prefix=r-"}
    assert not rows["client-id-prefix=r-,paused"].enforced
    assert rows["client-id-prefix=r-"].rate < MB


def test_a_paused_client_without_room_does_not_count_for_the_others_without_room():
    world = PauseWorld(ALL, max_client_entities=1)
    assert world.client_quotas("first").charge(CONSUMER, 1.0, 0.0) is None
    world.pause(client_id="a")
    for at_ms in range(0, 10_000, 1000):
        assert world.client_quotas("a").charge(CONSUMER, 100 * MB, float(at_ms)) is None
        assert world.client_quotas("b").charge(CONSUMER, MB / 2, float(at_ms)) is None
    rows = {row.entity: row for row in world.rows(9000.0)}
    assert (rows["other,paused"].enforced, rows["other"].enforced) == (False, True)
    assert rows["other"].rate < MB


def test_a_pause_for_the_clients_of_a_rule_keeps_their_sensor():
    world = PauseWorld(SHARED)
    world.pause(client_id_prefix="r-")
    assert not world.is_held("r-1")
    (row,) = world.rows(0.0)
    assert (row.entity, row.enforced) == ("client-id-prefix=r-", False)


def test_a_later_pause_takes_the_place_of_one_with_the_same_keys():
    world = PauseWorld(ALL)
    world.pause(until_s=NOON_S + 10)
    later = world.pause(until_s=NOON_S + 20)
    assert world.registry.pauses() == [later]
    assert world.end_due(NOON_S + 10) == []
    assert world.end_due(NOON_S + 20) == [later]


def test_it_ends_by_itself_and_outlives_a_restart():
    world = PauseWorld(ALL)
    first, second = world.pause(until_s=NOON_S + 10, client_id="a"), world.pause(NOON_S + 20)
    world.reopen()
    assert world.registry.pauses() == [second, first]
    assert not world.is_held("b")
    assert world.end_due(NOON_S + 9.9) == []
    assert world.end_due(NOON_S + 10) == [first]
    assert world.registry.pauses() == [second]
    world.reopen()
    assert world.registry.pauses() == [second]
    assert world.end_due(NOON_S + HOUR_S) == [second], "the time went by meanwhile"
    assert world.store.items(PAUSES) == []
    assert world.is_held("b")
    assert world.end_due(NOON_S + HOUR_S) == []


def test_an_override_ends_by_itself():
    world = PauseWorld(ALL)
    key = {"client-id": "a"}
    made = at_once(
        world.registry.put(make_override(key, {CONSUMER: 1000 * MB}, until_s=NOON_S + 10))
    )
    assert made.until_s == NOON_S + 10
    assert not world.is_held("a")
    world.reopen()
    assert world.registry.composed.entries[0] == made
    (ended,) = world.end_due(NOON_S + 10)
    assert ended.rule.bounds == made.rule.bounds
    assert world.is_held("a")
    assert world.store.items(OVERRIDES) == []


def test_what_cannot_be_deleted_has_ended_all_the_same():
    class Full(MemoryStore):
        full = False

        def put_many(self, records, *, delete=()):
            if self.full:
                raise StateError("the disk is full", "make room")
            return super().put_many(records, delete=delete)

    world = PauseWorld(ALL, store=Full())
    world.pause(until_s=NOON_S + 10)
    Full.full = True
    with pytest.raises(StateError):
        world.end_due(NOON_S + 10)
    assert world.registry.pauses() == []
    assert world.is_held("a")
    with pytest.raises(StateError):
        world.pause()
    assert world.registry.pauses() == []
    Full.full = False
    world.reopen()
    assert len(world.end_due(NOON_S + 10)) == 1


def test_what_is_set_again_while_it_ends_is_kept():
    class Slow(PauseWorld):
        def reopen(self):
            self.open_quotas(self.file)

            async def elsewhere(compose):
                meanwhile, self.meanwhile = self.meanwhile, None
                if meanwhile is not None:
                    await meanwhile()
                return compose()

            self.meanwhile = None
            self.registry = RuleRegistry(self.quotas, self.store, self.file, elsewhere)

    world = Slow(ALL)
    world.pause(until_s=NOON_S + 10)
    again = QuotaPause({}, NOON_S + 99)
    world.meanwhile = lambda: world.registry.pause(again)
    assert len(world.end_due(NOON_S + 10)) == 1
    assert world.registry.pauses() == [again]
    world.reopen()
    assert world.registry.pauses() == [again]
    assert not world.is_held("a")


def test_there_are_no_more_than_are_kept():
    world = PauseWorld(ALL)
    for number in range(MAX_PAUSES):
        world.pause(client_id=f"{number}")
    world.pause(client_id="0")
    with pytest.raises(ValueError, match="100 pauses"):
        world.pause(client_id="one more")
    assert len(world.resume()) == MAX_PAUSES


def test_keys_that_no_rule_can_have_are_refused():
    world = PauseWorld(ALL)
    with pytest.raises(ValueError, match="topic"):
        world.pause(topic="orders")


@pytest.mark.parametrize(
    ("key", "value", "version", "said"),
    [
        ("all", {"by": None, "at_s": None}, 1, "lacks until_s"),
        ("all", {"until_s": "soon", "by": None, "at_s": None}, 1, "when it ends"),
        ("all", {"until_s": 1.0, "by": 7, "at_s": None}, 1, "who made it"),
        ("all", {"until_s": 1.0, "by": None, "at_s": "x"}, 1, "when it was made"),
        ("all", {"until_s": 1.0, "by": None, "at_s": None}, 2, "form 2"),
        ("user", {"until_s": 1.0, "by": None, "at_s": None}, 1, "KEY=VALUE"),
        ("client-id=a,user=b", {"until_s": 1.0, "by": None, "at_s": None}, 1, "its name"),
    ],
)
def test_what_cannot_be_read_is_said(key, value, version, said):
    store = MemoryStore()
    store.put_many([Record.of(PAUSES + key, value, version)])
    with pytest.raises(StateError, match=said):
        PauseWorld(ALL, store=store)


@pytest.mark.parametrize(
    ("said", "in_file", "enforced"),
    [
        (None, True, True),
        (None, False, False),
        (True, False, True),
        (False, True, False),
    ],
)
def test_an_override_says_whether_it_is_enforced_or_leaves_it_to_the_file(said, in_file, enforced):
    world = PauseWorld(Rule(client_id="a", bounds={CONSUMER: MB}, enforce=in_file))
    key = {"client-id": "a"}
    made = at_once(world.registry.put(make_override(key, {CONSUMER: MB / 2}, enforce=said)))
    assert (made.enforce, made.rule.enforce) == (said, enforced)
    world.reopen()
    assert world.registry.composed.entries[0] == made
    assert world.is_held("a") is enforced


def test_the_clusters_rules_are_enforced_as_the_file_says():
    world = PauseWorld(Rule(client_id="a", bounds={CONSUMER: MB}, enforce=False))
    at_once(
        world.registry.use_kafka(
            [Rule(client_id=name, bounds={CONSUMER: MB / 2}) for name in ("a", "b")]
        )
    )
    assert not world.is_held("a")
    assert world.is_held("b")
