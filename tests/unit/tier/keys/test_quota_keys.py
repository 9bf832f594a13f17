"""What clients share is divided, or they have one key: against brute force, and by usual rules."""

from itertools import combinations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.quota.entities import CONSUMER_BYTE_RATE, DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, Rule, RuleTable
from proxy.tier.quota_keys import MAX_KNOWN_KEYS, LinkedClients, QuotaKeys

LISTENERS = ("in", "out")
USERS = (None, "alice", "bob", "carol")
CLIENT_IDS = (None, "a", "ab", "abc", "b", "ba", "z")
UNIVERSE = [ClientIdentity(*each) for each in product(LISTENERS, USERS, CLIENT_IDS)]
KINDS = list(QuotaKind)
TOPICS = ("orders", "logs-a", "logs-b")
CONSUMER, PRODUCER, PERCENTAGE, CONNECTIONS, CONNECTION_RATE = KINDS


def rule(*kinds: QuotaKind, **keys: object) -> Rule:
    return Rule(bounds=dict.fromkeys(kinds or (CONSUMER,), 10.0), **keys)


def any_rule(chance: Random, *, topics: bool) -> Rule:
    user = chance.choice((None, None, DEFAULT, "alice", "bob"))
    client = chance.choice(
        (
            *({}, {}, {"client_id": DEFAULT}, {"client_id": "a"}, {"client_id": "ab"}),
            *({"client_id_prefix": each} for each in ("a", "ab", "b")),
        )
    )
    listener = chance.choice((None, None, None, "in", "out"))
    by_topic = ({"topic": "orders"}, {"topic": "logs-a"}, {"topic_prefix": "logs-"})
    topic = chance.choice(({},) * 5 + by_topic) if topics else {}
    if user is None and not client and listener is None and not topic:
        client = {"client_id": DEFAULT}
    some = KINDS[: 2 if topic else 3]
    kinds = chance.sample(some, chance.randint(1, len(some)))
    scope = chance.choice(("each", "shared"))
    adaptive = None
    if client and scope == "each" and CONSUMER in kinds and not topic and chance.random() < 0.2:
        adaptive = AdaptiveSettings()
    bounds = dict.fromkeys(kinds, 10.0)
    keys = {**client, **topic, "user": user, "listener": listener}
    return Rule(**keys, scope=scope, bounds=bounds, adaptive=adaptive)


def any_set(chance: Random) -> LinkedClients:
    ids = chance.sample(("a", "ab", "z"), chance.randint(1, 3))
    return LinkedClients(chance.choice(("pipeline:p", "pipeline:q")), frozenset(ids))


def things(
    identity: ClientIdentity, table: RuleTable, sets: list[LinkedClients], keys: QuotaKeys
) -> set[object]:
    """Return all that a client can share with another, and that is not divided."""
    found: set[object] = set()
    for kind in QuotaKind:
        match = table.match(kind, identity)
        if match is not None:
            if not keys.is_divided(match.rule):
                found.add((kind, match.entity))
            if kind is CONSUMER_BYTE_RATE and match.rule.adaptive is not None:
                found.add(("query", identity.client_id or ""))
    for kind, topic in product(KINDS[:2], TOPICS):
        match = table.match(kind, identity, topic)
        if match is not None and not keys.is_divided(match.rule):
            found.add((kind, match.entity))
    client_id = identity.client_id or ""
    for each in sets:
        if client_id in each.client_ids:
            found.add(("set", each.name))
    return found


def check(all_rules: list[Rule], sets: list[LinkedClients]) -> None:
    # Of rules with the same keys one is in force, as `compose` sees to.
    all_rules = list({tuple(each.keys.items()): each for each in all_rules}.values())
    keys, table = QuotaKeys(all_rules, sets), RuleTable(all_rules)
    holders: dict[object, ClientIdentity] = {}
    for identity in UNIVERSE:
        for thing in things(identity, table, sets, keys):
            other = holders.setdefault(thing, identity)
            assert keys.key_of(other) == keys.key_of(identity), (thing, other, identity)
            if thing[0] == "query":
                assert keys.key_of_query(thing[1]) == keys.key_of(identity)
            if thing[0] == "set":
                assert keys.key_of_set(thing[1]) == keys.key_of(identity)


@settings(max_examples=1500)
@given(st.integers(0, 10**9), st.booleans(), st.integers(0, 20))
def test_clients_that_share_what_is_not_divided_have_one_key(seed, topics, count):
    chance = Random(seed)
    rules = [any_rule(chance, topics=topics) for _ in range(count)]
    check(rules, [any_set(chance) for _ in range(chance.randint(0, 2))])


def test_topics_of_clients_that_are_named_keep_clients_apart():
    rules = [
        rule(client_id="etl", topic="orders"),
        rule(client_id=DEFAULT, topic_prefix="logs-"),
        rule(topic="orders"),
        rule(client_id=DEFAULT),
    ]
    keys = QuotaKeys(rules)
    assert len(set(keys_of(keys, client("etl"), client("a"), client("b")))) == 3
    assert [keys.is_divided(each) for each in rules] == [False, False, True, False]


def keys_of(keys: QuotaKeys, *identities: ClientIdentity) -> list[str]:
    return [keys.key_of(each) for each in identities]


def client(client_id: str | None, user: str | None = None, listener: str = "in") -> ClientIdentity:
    return ClientIdentity(listener, user, client_id)


def test_client_id_rules_of_all_sorts_keep_clients_apart():
    of_kinds = [kinds for size in range(1, 6) for kinds in combinations(KINDS, size)]
    all_rules = [
        rule(*of_kinds[at % len(of_kinds)], client_id=f"app-{at}", scope=("each", "shared")[at % 2])
        for at in range(200)
    ]
    keys = QuotaKeys([*all_rules, rule(*KINDS, client_id=DEFAULT)])
    found = keys_of(keys, *(client(f"app-{at}") for at in range(250)))
    assert found == [f"client-id=app-{at}" for at in range(250)]


def test_what_a_shared_rule_adds_up_is_divided_and_its_clients_are_apart():
    shared = [
        rule(client_id_prefix="etl-", scope="shared"),
        rule(client_id=DEFAULT, scope="shared"),
        rule(listener="out", scope="shared"),
        rule(user=DEFAULT, scope="shared"),
        rule(user=DEFAULT, client_id="etl", scope="shared"),
    ]
    one = [rule(client_id="etl", scope="shared"), rule(user="alice", client_id="x", scope="shared")]
    keys = QuotaKeys([*shared, *one])
    assert all(map(keys.is_divided, shared))
    assert not any(map(keys.is_divided, one))
    assert keys_of(keys, client("etl-1"), client("etl-2")) == ["client-id=etl-1", "client-id=etl-2"]


@pytest.mark.parametrize("kinds", [(CONSUMER,), (CONSUMER, PRODUCER), tuple(KINDS)])
def test_user_rules_keep_users_apart_and_anonymous_clients_too(kinds):
    rules = [
        rule(*kinds, user="alice"),
        rule(CONSUMER, user="bob"),
        rule(*kinds, user=DEFAULT),
        rule(*kinds, client_id=DEFAULT),
    ]
    keys = QuotaKeys(rules)
    assert not any(map(keys.is_divided, rules))
    assert keys_of(keys, client("x", "alice"), client("y", "alice")) == ["user=alice"] * 2
    assert keys_of(keys, client("x", "bob"), client("x", "carol")) == ["user=bob", "user=carol"]
    assert keys_of(keys, client("x"), client("y")) == ["client-id=x", "client-id=y"]


def test_rules_for_user_and_client_id_keep_both_apart():
    keys = QuotaKeys(
        [
            rule(CONSUMER, PRODUCER, user="alice", client_id="a"),
            rule(CONSUMER, user="alice", client_id="b"),
            rule(CONSUMER, PRODUCER, user=DEFAULT, client_id=DEFAULT),
        ]
    )
    found = keys_of(keys, client("a", "alice"), client("b", "alice"), client("b", "bob"))
    assert found == ["user=alice,client-id=a", "user=alice,client-id=b", "user=bob,client-id=b"]


def test_listener_rules_keep_clients_apart():
    keys = QuotaKeys([rule(*KINDS, listener="out")])
    clients = client("a", "bob", "out"), client("b", "bob", "out"), client("a", None, "out")
    assert keys_of(keys, *clients) == [
        "user=bob,client-id=a",
        "user=bob,client-id=b",
        "client-id=a",
    ]


def test_of_rules_that_overlap_what_users_have_is_divided():
    """Alice's clients share what she reads, and what each of them produces with bob's."""
    alice, every = rule(CONSUMER, user="alice"), rule(PRODUCER, client_id=DEFAULT)
    keys = QuotaKeys([alice, every])
    found = keys_of(keys, client("a", "alice"), client("a", "bob"), client("c", "alice"))
    assert found == ["client-id=a", "client-id=a", "client-id=c"]
    assert (keys.is_divided(alice), keys.is_divided(every)) == (True, False)


def test_a_user_whom_no_rule_for_client_ids_reaches_goes_by_the_user():
    alice = rule(CONSUMER, user="alice")
    keys = QuotaKeys([alice, rule(CONSUMER, client_id=DEFAULT)])
    assert keys_of(keys, client("a", "alice"), client("a", "bob")) == ["user=alice", "client-id=a"]
    assert not keys.is_divided(alice)
    beside = QuotaKeys([alice], [LinkedClients("q", frozenset({"q"}))])
    assert keys_of(beside, client("a", "alice"), client("q", "alice")) == [
        "user=alice",
        "client-id=q",
    ]
    assert beside.is_divided(alice)


def test_clients_without_rules_go_by_their_client_id():
    keys = QuotaKeys([rule(user="alice")])
    assert keys_of(keys, client("a", "bob"), client("a")) == ["client-id=a"] * 2
    assert keys.key_of(client(None)) == keys.key_of(client("")) == "client-id="


def test_a_pipeline_has_one_key_and_a_query_its_own():
    pipeline = LinkedClients("pipeline:p", frozenset({"feed", "join"}))
    query = LinkedClients("join", frozenset({"join"}))
    other = LinkedClients("alone", frozenset({"alone"}))
    keys = QuotaKeys([rule(CONSUMER, client_id=DEFAULT)], [query, pipeline, other])
    name = keys.key_of_set("pipeline:p")
    assert keys_of(keys, client("feed"), client("join")) == [name, name]
    assert keys.key_of_query("join") == keys.key_of_set("join") == name
    assert keys_of(keys, client("alone"), client("x")) == ["client-id=alone", "client-id=x"]
    assert keys.key_of_set("pipeline:unknown") == "pipeline:unknown"


def test_an_adaptive_bound_goes_by_client_id_whatever_the_user():
    keys = QuotaKeys(
        [
            rule(user=DEFAULT, client_id_prefix="spark-", adaptive=AdaptiveSettings()),
            rule(user=DEFAULT, client_id=DEFAULT),
        ]
    )
    found = keys_of(keys, client("spark-1", "alice"), client("spark-1", "bob"))
    assert found == ["client-id=spark-1"] * 2
    assert keys.key_of_query("spark-2") == "client-id=spark-2"


def test_two_users_adaptive_bounds_for_one_client_id_are_one():
    keys = QuotaKeys(
        [rule(user=each, client_id="q", adaptive=AdaptiveSettings()) for each in ("alice", "bob")]
    )
    assert keys_of(keys, client("q", "alice"), client("q", "bob")) == ["client-id=q"] * 2


def test_values_cannot_be_taken_for_other_keys():
    keys = QuotaKeys([rule(user=DEFAULT, client_id=DEFAULT)])
    assert keys.key_of(client("b", "a,client-id=b")) != keys.key_of(client("b,client-id=b", "a"))


def test_what_is_remembered_is_bounded():
    keys = QuotaKeys([rule(client_id=DEFAULT)])
    first = keys.key_of(client("first"))
    assert keys.key_of(client("first")) is first
    for at in range(MAX_KNOWN_KEYS):
        keys.key_of(client(str(at)))
    again = keys.key_of(client("first"))
    assert again == first
    assert again is not first, "it was forgotten, with all others"
