"""What the keys of a tier are made of gets through its state as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.members.client_set import ClientSet
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveBound, Rule
from proxy.state import MemoryStore, Record, StateError
from proxy.workers.shared_keys import KeyRules
from proxy.workers.tier_keys import KEYS_KEY, digest_of, keys_record, read_keys, text_of

KINDS = [QuotaKind.CONSUMER_BYTE_RATE, QuotaKind.PRODUCER_BYTE_RATE]
names = st.sampled_from(["a", "ab", "b,c", "ü", "d e"])
users = st.none() | names


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    client_id, prefix = draw(st.sampled_from([(None, None), ("x", None), (None, "x")]))
    user = draw(users)
    if (user, client_id, prefix) == (None, None, None):
        client_id = "y"
    return Rule(
        user=user,
        client_id=client_id,
        client_id_prefix=prefix,
        listener=draw(users),
        scope="each",
        bounds=draw(st.dictionaries(st.sampled_from(KINDS), st.floats(1, 1e12), min_size=1)),
        number=draw(st.integers(0, 9)),
    )


client_sets = st.builds(ClientSet, names, st.frozensets(names), st.lists(names).map(tuple))
key_rules = st.builds(
    KeyRules, st.lists(rules(), max_size=4).map(tuple), st.lists(client_sets, max_size=3).map(tuple)
)
clients = st.builds(ClientIdentity, names, users, users)


@given(key_rules, st.lists(clients, max_size=5))
def test_keys_are_the_same_after_the_state(ours: KeyRules, asked: list[ClientIdentity]) -> None:
    store = MemoryStore()
    store.put_many([keys_record(ours)])
    found = read_keys(store)
    assert found is not None
    assert text_of(found) == text_of(ours)
    assert digest_of(found) == digest_of(ours)
    mine, theirs = ours.keys(), found.keys()
    for each in asked:
        assert theirs.key_of(each) == mine.key_of(each)


@given(key_rules)
def test_the_same_rules_make_the_same_record(ours: KeyRules) -> None:
    """Otherwise it would be written again and again."""
    sets = [
        ClientSet(each.name, frozenset(sorted(each.client_ids)), each.prefixes)
        for each in ours.together
    ]
    again = KeyRules(ours.rules, tuple(sets))
    assert keys_record(again) == keys_record(ours)


def test_a_rule_that_adapts_stays_one() -> None:
    bounds = {QuotaKind.CONSUMER_BYTE_RATE: 10.0}
    plain = KeyRules((Rule(client_id="a", bounds=bounds),), ())
    adapts = KeyRules((Rule(client_id="a", bounds=bounds, adaptive=AdaptiveBound()),), ())
    assert digest_of(plain) != digest_of(adapts)
    store = MemoryStore()
    store.put_many([keys_record(adapts)])
    found = read_keys(store)
    assert found is not None
    assert found.rules[0].adaptive is not None


def test_nobody_has_written_it_yet() -> None:
    assert read_keys(MemoryStore()) is None


@pytest.mark.parametrize(
    "record",
    [
        Record.of(KEYS_KEY, "bm90IHppcHBlZA==", 1),
        Record.of(KEYS_KEY, "?", 1),
        Record.of(KEYS_KEY, keys_record(KeyRules((), ())).value, 2),
    ],
)
def test_what_cannot_be_read_is_said_with_how_to_mend_it(record: Record) -> None:
    store = MemoryStore()
    store.put_many([record])
    with pytest.raises(StateError, match="the rules that the tier goes by cannot be read") as told:
        read_keys(store)
    assert "all machines" in told.value.fix
