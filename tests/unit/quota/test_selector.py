"""Selectors: one line for the keys of a rule, both ways."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.quota.entities import DEFAULT
from proxy.quota.validation import CLIENT_KEYS, format_selector, parse_selector


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"client-id": "etl-orders"}, "client-id=etl-orders"),
        ({"client-id": DEFAULT, "user": "alice"}, "user=alice,client-id=<default>"),
        ({"user": DEFAULT, "listener": "tenants"}, "listener=tenants,user=<default>"),
        ({"client-id-prefix": "a,b=c%/?# é"}, "client-id-prefix=a%2Cb%3Dc%25%2F%3F%23%20%C3%A9"),
        ({"client-id": "<default"}, "client-id=%3Cdefault"),
        ({"topic": "orders", "client-id": "etl"}, "client-id=etl,topic=orders"),
        ({"topic-prefix": "."}, "topic-prefix=."),
    ],
)
def test_keys_have_one_selector(keys, text):
    assert format_selector(keys) == text
    assert parse_selector(text) == keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("client-id=a,user=b", {"client-id": "a", "user": "b"}),
        ("client-id=%3Cdefault%3E", {"client-id": DEFAULT}),
        ("user=CN%3dalice", {"user": "CN=alice"}),
        ("client-id=a b/c+é", {"client-id": "a b/c+é"}),
    ],
)
def test_a_selector_may_be_written_in_other_ways(text, keys):
    assert parse_selector(text) == keys


VALUES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(st.dictionaries(st.sampled_from(CLIENT_KEYS), VALUES, min_size=1))
def test_every_selector_is_read_back(keys):
    if {"client-id", "client-id-prefix"} <= keys.keys():
        del keys["client-id"]
    text = format_selector(keys)
    assert text.isascii()
    assert text.isprintable()
    assert parse_selector(text) == keys


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "fits no client: it has no key"),
        ("alice", "'alice' is not KEY=VALUE"),
        ("user=alice,", "'' is not KEY=VALUE"),
        ("user=CN=alice", "'user=CN=alice' is not KEY=VALUE: quote , = and % in a value"),
        ("user=", "user: is empty text"),
        ("=alice", '"" is not known here'),
        ("partition=0", '"partition" is not known here'),
        ("topic=<default>", 'topic: "<default>" is no name of a topic'),
        ("topic-prefix=a b", 'topic-prefix: "a b" begins no name of a topic'),
        ("topic=a,topic-prefix=a", "has both topic and topic-prefix"),
        ("User=x", '"User" is not known here'),
        ("user=a,user=b", "names user twice"),
        ("user=100%", "user: '100%' is not quoted as in URLs"),
        ("user=%ff", "user: '%ff' is not quoted as in URLs"),
        ("client-id=a,client-id-prefix=a", "has both client-id and client-id-prefix"),
        ("client-id-prefix=<default>", "client-id-prefix: <default> is no prefix"),
        ("user=\udcff", "user is not valid text"),
    ],
)
def test_what_is_no_selector_is_refused(text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - compared below, as it stands
        parse_selector(text)
    assert message in str(caught.value)
