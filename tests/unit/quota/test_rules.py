"""Precedence and entities, against tables and against an oracle that shares no code."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.rules import MAX_MISMATCHES, OTHER, Rule, RuleMatch, RuleTable

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
PRODUCER = QuotaKind.PRODUCER_BYTE_RATE
ALICE = ClientIdentity("tenants", "alice", "etl-orders")

# Every form of rule that matches ALICE, the first one to apply on top. The comment gives Kafka's
# own eight levels their number.
LEVELS: list[tuple[str, dict[str, str]]] = [
    (
        "user, client, listener",
        {"user": "alice", "client_id": "etl-orders", "listener": "tenants"},
    ),
    ("user, client", {"user": "alice", "client_id": "etl-orders"}),  # 1
    (
        "user, long prefix, listener",
        {"user": "alice", "client_id_prefix": "etl-", "listener": "tenants"},
    ),
    ("user, long prefix", {"user": "alice", "client_id_prefix": "etl-"}),
    ("user, short prefix", {"user": "alice", "client_id_prefix": "e"}),
    ("user, listener", {"user": "alice", "listener": "tenants"}),
    (
        "user, default client, listener",
        {"user": "alice", "client_id": DEFAULT, "listener": "tenants"},
    ),
    ("user, default client", {"user": "alice", "client_id": DEFAULT}),  # 2
    ("user", {"user": "alice"}),  # 3
    ("default user, client", {"user": DEFAULT, "client_id": "etl-orders"}),  # 4
    ("default user, prefix", {"user": DEFAULT, "client_id_prefix": "etl-"}),
    ("default user, listener", {"user": DEFAULT, "listener": "tenants"}),
    ("default user, default client", {"user": DEFAULT, "client_id": DEFAULT}),  # 5
    ("default user", {"user": DEFAULT}),  # 6
    ("client, listener", {"client_id": "etl-orders", "listener": "tenants"}),
    ("client", {"client_id": "etl-orders"}),  # 7
    ("long prefix, listener", {"client_id_prefix": "etl-", "listener": "tenants"}),
    ("long prefix", {"client_id_prefix": "etl-"}),
    ("short prefix, listener", {"client_id_prefix": "e", "listener": "tenants"}),
    ("short prefix", {"client_id_prefix": "e"}),
    ("listener", {"listener": "tenants"}),
    ("default client, listener", {"client_id": DEFAULT, "listener": "tenants"}),
    ("default client", {"client_id": DEFAULT}),  # 8
]
KEYS = dict(LEVELS)


def rule(number: int = 0, /, kinds=(CONSUMER,), scope="each", place="", **keys) -> Rule:
    return Rule(
        **keys, scope=scope, bounds=dict.fromkeys(kinds, 1000.0), number=number, place=place
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(a, b, id=f"{a} before {b}")
        for a, b in itertools.combinations([name for name, _ in LEVELS], 2)
    ],
)
def test_each_level_beats_all_that_follow_in_either_order_of_the_file(first, second):
    for winner, loser in ((0, 1), (1, 0)):
        table = RuleTable([rule(loser, **KEYS[second]), rule(winner, **KEYS[first])])
        match = table.match(CONSUMER, ALICE)
        assert match is not None
        assert match.rule.number == winner


def test_of_two_rules_with_the_same_keys_the_earlier_one_applies():
    table = RuleTable([rule(2, user="alice"), rule(1, user="alice")])
    assert table.match(CONSUMER, ALICE).rule.number == 1


def test_among_thousands_of_rules_each_client_finds_its_own():
    # Looking at one rule after another would take many seconds.
    table = RuleTable(rule(number, client_id=f"client-{number}") for number in range(5000))
    clients = (ClientIdentity("l", None, f"client-{number}") for number in range(5000))
    matches = [table.match(CONSUMER, client) for client in clients]
    assert [match and match.rule.number for match in matches] == list(range(5000))


def test_each_kind_of_quota_finds_its_rule_by_itself():
    table = RuleTable(
        [
            rule(1, kinds=(PRODUCER,), user="alice", client_id="etl-orders"),
            rule(2, kinds=(CONSUMER, PRODUCER), client_id=DEFAULT),
        ]
    )
    assert table.match(PRODUCER, ALICE).rule.number == 1
    assert table.match(CONSUMER, ALICE).rule.number == 2
    assert table.match(QuotaKind.REQUEST_PERCENTAGE, ALICE) is None


@pytest.mark.parametrize(
    ("keys", "identity", "matches"),
    [
        pytest.param({"user": DEFAULT}, ClientIdentity("l", None, "c"), False, id="anonymous"),
        pytest.param({"user": "alice"}, ClientIdentity("l", None, "c"), False, id="no user"),
        pytest.param({"user": "alice"}, ClientIdentity("l", "bob", "c"), False, id="other user"),
        pytest.param({"client_id": DEFAULT}, ClientIdentity("l", None, None), True, id="no id"),
        pytest.param({"client_id": "c"}, ClientIdentity("l", None, None), False, id="id wanted"),
        pytest.param({"client_id": "c"}, ClientIdentity("l", "bob", "c"), True, id="id of a user"),
        pytest.param({"client_id_prefix": "c"}, ClientIdentity("l", None, "c"), True, id="all"),
        pytest.param({"client_id_prefix": "cc"}, ClientIdentity("l", None, "c"), False, id="less"),
        pytest.param({"client_id_prefix": "c"}, ClientIdentity("l", None, None), False, id="null"),
        pytest.param({"listener": "m"}, ClientIdentity("l", None, "c"), False, id="listener"),
    ],
)
def test_which_clients_a_rule_is_for(keys, identity, matches):
    assert (RuleTable([rule(**keys)]).match(CONSUMER, identity) is not None) is matches


ANONYMOUS = ClientIdentity("tenants", None, None)


@pytest.mark.parametrize(
    ("keys", "scope", "identity", "entity"),
    [
        ({"user": "alice"}, "each", ALICE, "user=alice"),
        ({"user": DEFAULT}, "each", ALICE, "user=alice"),
        ({"user": DEFAULT}, "shared", ALICE, "user=<default>"),
        ({"client_id": "etl-orders"}, "each", ALICE, "client-id=etl-orders"),
        ({"client_id": "etl-orders"}, "shared", ALICE, "client-id=etl-orders"),
        ({"client_id_prefix": "etl-"}, "each", ALICE, "client-id=etl-orders"),
        ({"client_id_prefix": "etl-"}, "shared", ALICE, "client-id-prefix=etl-"),
        ({"client_id": DEFAULT}, "each", ALICE, "client-id=etl-orders"),
        ({"client_id": DEFAULT}, "each", ANONYMOUS, "client-id="),
        ({"client_id": DEFAULT}, "shared", ALICE, "client-id=<default>"),
        (
            {"user": DEFAULT, "client_id": DEFAULT},
            "each",
            ALICE,
            "user=alice,client-id=etl-orders",
        ),
        (
            {"user": "alice", "client_id": DEFAULT},
            "shared",
            ALICE,
            "user=alice,client-id=<default>",
        ),
        (
            {"listener": "tenants"},
            "each",
            ALICE,
            "listener=tenants,user=alice,client-id=etl-orders",
        ),
        ({"listener": "tenants"}, "each", ANONYMOUS, "listener=tenants,client-id="),
        ({"listener": "tenants"}, "shared", ALICE, "listener=tenants"),
        ({"listener": "tenants", "user": "alice"}, "each", ALICE, "listener=tenants,user=alice"),
        (
            {"listener": "tenants", "client_id": DEFAULT},
            "each",
            ALICE,
            "listener=tenants,client-id=etl-orders",
        ),
    ],
)
def test_entity(keys, scope, identity, entity):
    match = RuleTable([rule(scope=scope, **keys)]).match(CONSUMER, identity)
    assert match is not None
    assert match.entity == entity


texts = st.text(st.sampled_from("ab,=%<>"), max_size=4) | st.just(DEFAULT)
identities = st.builds(ClientIdentity, texts, texts, texts)


@given(identities, identities)
def test_different_clients_never_share_an_entity_of_scope_each(one, two):
    table = RuleTable([rule(user=DEFAULT, client_id=DEFAULT)])
    same = (one.user, one.client_id) == (two.user, two.client_id)
    assert (table.match(CONSUMER, one).entity == table.match(CONSUMER, two).entity) is same


@given(identities)
def test_no_client_can_name_itself_into_a_shared_sensor(identity):
    each = RuleTable([rule(client_id=DEFAULT)]).match(CONSUMER, identity).entity
    shared = RuleTable([rule(client_id=DEFAULT, scope="shared")]).match(CONSUMER, identity).entity
    assert each != shared
    assert each != OTHER


# The oracle spells the levels out, one question after the other, and knows nothing of ranks.
def oracle(rules: list[Rule], identity: ClientIdentity) -> int | None:
    def pick(user: str | None, client: tuple[str, str] | None, listener: str | None):
        for found in rules:
            named = (
                ("exact", found.client_id)
                if found.client_id is not None
                else ("prefix", found.client_id_prefix)
                if found.client_id_prefix is not None
                else None
            )
            if (found.user, named, found.listener) == (user, client, listener):
                return found.number
        return None

    name = identity.client_id or ""
    clients: list[tuple[str, str] | None] = [("exact", name)]
    clients += [("prefix", name[:length]) for length in range(len(name), 0, -1)]
    users = [identity.user, DEFAULT, None] if identity.user is not None else [None]
    for user in users:
        for client in clients:
            for listener in (identity.listener, None):
                if (number := pick(user, client, listener)) is not None:
                    return number
        if (number := pick(user, None, identity.listener)) is not None:
            return number
        for listener in (identity.listener, None):
            if (number := pick(user, ("exact", DEFAULT), listener)) is not None:
                return number
        if user is not None and (number := pick(user, None, None)) is not None:
            return number
    return None


some_user = st.sampled_from([None, "u", "v"])
some_client = st.sampled_from([None, "a", "ab", "abc", "b"])
some_keys = st.fixed_dictionaries(
    {
        "user": some_user | st.just(DEFAULT),
        "client": st.sampled_from(
            [
                {},
                *({"client_id": value} for value in ("a", "ab", "b", DEFAULT)),
                *({"client_id_prefix": value} for value in ("a", "ab", "abc")),
            ]
        ),
        "listener": st.sampled_from([None, "l", "m"]),
    }
).filter(lambda keys: keys["user"] or keys["client"] or keys["listener"])


@given(
    st.lists(some_keys, max_size=12),
    st.builds(ClientIdentity, st.sampled_from(["l", "m"]), some_user, some_client),
)
def test_precedence_equals_the_levels_asked_one_by_one(all_keys, identity):
    rules = [
        rule(number, user=keys["user"], listener=keys["listener"], **keys["client"])
        for number, keys in enumerate(all_keys)
    ]
    match = RuleTable(reversed(rules)).match(CONSUMER, identity)
    assert (match.rule.number if match else None) == oracle(rules, identity)


def test_explain_names_every_rule_in_order_and_why():
    table = RuleTable(
        [
            rule(1, client_id=DEFAULT, place="q.yaml:9"),
            rule(2, user="bob", place="q.yaml:10"),
            rule(3, client_id_prefix="etl-", place="q.yaml:11"),
            rule(4, kinds=(PRODUCER,), listener="internal"),
            rule(5, kinds=(PRODUCER,), user=DEFAULT, client_id="x"),
        ]
    )
    told = [(c.kind, c.rule.number, c.chosen, c.reason) for c in table.explain(ALICE)]
    assert told == [
        (CONSUMER, 2, False, "the user is 'alice', not 'bob'"),
        (CONSUMER, 3, True, "applies to client-id=etl-orders"),
        (CONSUMER, 1, False, "rule 3 (q.yaml:11) comes first"),
        (PRODUCER, 5, False, "the client-id is 'etl-orders', not 'x'"),
        (PRODUCER, 4, False, "the listener is 'tenants', not 'internal'"),
    ]
    anonymous = [c.reason for c in table.explain(ANONYMOUS)]
    assert anonymous[0] == "the client has not authenticated"
    assert anonymous[1] == "the client-id '' does not begin with 'etl-'"


def test_of_many_rules_those_that_matter_are_explained():
    many = [rule(number, client_id=f"tenant-{number}") for number in range(2000)]
    near = rule(3000, user="bob", client_id="etl-orders")
    table = RuleTable([*many, near, rule(3001, client_id_prefix="etl-"), rule(3002, user="alice")])
    told = [(c.rule.number, c.reason) for c in table.explain(ALICE)]
    assert (3000, "the user is 'alice', not 'bob'") in told
    assert [each for each in told if "tenant" not in each[1]][-2:] == [
        (3002, "applies to user=alice"),
        (3001, "rule 3002 comes first"),
    ]
    assert len(told) == 2 + MAX_MISMATCHES
    assert table.count(CONSUMER) == 2003


@given(
    st.lists(some_keys, max_size=8),
    st.builds(ClientIdentity, st.just("l"), some_user, some_client),
)
def test_explain_chooses_what_match_returns(all_keys, identity):
    table = RuleTable(
        rule(number, user=keys["user"], listener=keys["listener"], **keys["client"])
        for number, keys in enumerate(all_keys)
    )
    match = table.match(CONSUMER, identity)
    chosen = [c.rule for c in table.explain(identity) if c.chosen]
    assert chosen == ([match.rule] if match else [])


def test_the_last_open_rule_overflows_into_other_and_the_rest_keep_their_keys():
    default = rule(1, client_id=DEFAULT)
    listener = rule(2, listener="tenants")
    fixed = rule(3, client_id="etl-orders")
    table = RuleTable([default, listener, fixed])
    assert table.overflow_entity(CONSUMER, RuleMatch(default, "c")) == "other"
    assert table.overflow_entity(CONSUMER, RuleMatch(listener, "c")) == "other,listener=tenants"
    assert [r.is_open for r in (default, listener, fixed)] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            {"client_id": "a", "client_id_prefix": "b", "bounds": {CONSUMER: 1.0}},
            "rule 7 (q.yaml:3) has both client-id and client-id-prefix: keep one of the two",
            id="id and prefix",
        ),
        pytest.param(
            {"bounds": {CONSUMER: 1.0}},
            "rule 7 (q.yaml:3) fits no client: it has no key: add one of user, client-id, "
            "client-id-prefix, listener; client-id: <default> fits every client",
            id="no key",
        ),
        pytest.param(
            {"user": "a", "bounds": {}},
            "rule 7 (q.yaml:3) sets no quota: add one of consumer_byte_rate, producer_byte_rate, "
            "request_percentage, max_connections, connection_rate",
            id="no bound",
        ),
        *(
            pytest.param(
                {"user": "a", "bounds": {CONSUMER: bound}},
                f"rule 7 (q.yaml:3): consumer_byte_rate is {bound}: give a finite number above 0",
                id=f"bound {bound}",
            )
            for bound in (0.0, -1.0, float("inf"), float("nan"))
        ),
        pytest.param(
            {"user": "a", "bounds": {CONSUMER: 1e-310}},
            "rule 7 (q.yaml:3): consumer_byte_rate is 1e-310: give 0.000000001 or more",
            id="what divides nothing",
        ),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        Rule(**arguments, place="q.yaml:3", number=7)
    assert str(caught.value) == message


def test_the_bounds_of_a_rule_cannot_be_changed_afterwards():
    bounds = {CONSUMER: 1.0}
    made = Rule(user="a", bounds=bounds)
    bounds[CONSUMER] = 2.0
    assert made.bounds == {CONSUMER: 1.0}
