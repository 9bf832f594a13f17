"""What stands in the topic of the state, without a broker."""

import tracemalloc
from types import SimpleNamespace

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from proxy.state import Record, StateError
from proxy.state.kafka.messages import (
    MAX_UNPACKED_BYTES,
    OWNER_KEY,
    StateOwner,
    decode_batches,
    read_message,
    to_message,
)
from proxy.state.kafka.state_topic import StateTopic


def received(key, value, headers=(), offset=42):
    """Return a message as aiokafka's readers give it."""
    return SimpleNamespace(key=key, value=value, headers=headers, offset=offset)


FORM = ("form", b"1")
VERSION = ("version", b"3")
WRITER = ("writer", b"tier/one")


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("a/b", Record("a/b", '{"c":1}', 3)),
        ("a/é🦜", Record("a/é🦜", '"x"', 1)),
        ("a/b", None),
        (OWNER_KEY, StateOwner("token", "host", 7)),
        (OWNER_KEY, None),
    ],
)
def test_what_is_written_is_read_back(key, content):
    written = to_message(key, content, "tier/one")
    assert read_message("t", 7, received(*written)) == ((7, key), content)


def test_the_form_is_a_contract():
    """Later versions must read it."""
    record = Record("a/b", '{"c":1}', 3)
    written = to_message("a/b", record, "tier/one")
    assert written == (b"a/b", b'{"c":1}', [FORM, VERSION, WRITER])
    assert to_message("a/b", None, "tier/one") == (b"a/b", None, [WRITER])
    # As earlier versions wrote them in the topic of a proxy without a tier.
    assert read_message("t", 0, received(*written[:2], [FORM, VERSION])) == ((0, "a/b"), record)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (received(b"a/b", b"1"), "was not written by quota-proxy: it has no header 'form'"),
        (received(b"a/b", b"1", [("form", b"2"), VERSION]), "its form is 2, this version knows 1"),
        (received(b"a/b", b"1", [("form", b"x"), VERSION]), "is damaged: ValueError"),
        (received(b"a/b", b"1", [("form", b""), VERSION]), "is damaged: ValueError"),
        (received(b"a/b", b"1", [FORM]), "is damaged: KeyError, 'version'"),
        (received(b"a/b", b"\xff", [FORM, VERSION]), "is damaged: UnicodeDecodeError"),
        (received(b"\xff", b"1", [FORM, VERSION]), "is damaged: UnicodeDecodeError"),
        (received(b"\xff", None), "is damaged: UnicodeDecodeError"),
        (received(b"owner", b"{", [FORM]), "is damaged: JSONDecodeError"),
        (received(b"owner", b"[]", [FORM]), "is damaged: TypeError"),
        (received(b"owner", b"[" * 100_000, [FORM]), "is damaged: RecursionError"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(message, text):
    with pytest.raises(StateError) as caught:
        read_message("the-topic", 0, message)
    assert "the message at offset 42 of topic the-topic" in caught.value.what
    assert text in caught.value.what
    assert caught.value.fix


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, "1"), (2, "1"), (3, "2")])
def test_one_broker_of_three_may_be_away(replicas, in_sync):
    assert StateTopic.settings(replicas)["min.insync.replicas"] == in_sync


def fetched(size: int) -> SimpleNamespace:
    """Return a partition that was fetched: a gzip batch of one value."""
    options = {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1, "is_transactional": 0}
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=1, batch_size=2 * size + 1000, **options
    )
    builder.append(0, 1, b"key", bytes(size), [])
    return SimpleNamespace(partition_index=0, records=bytes(builder.build()))


def test_a_batch_that_unpacks_to_too_much_is_not_unpacked():
    part = fetched(4 * MAX_UNPACKED_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(StateError, match="unpacks to more than"):
            list(decode_batches("t", part))
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_UNPACKED_BYTES
    finally:
        tracemalloc.stop()


def test_a_batch_near_the_limit_is_read():
    ((_, (message,)),) = decode_batches("t", fetched(MAX_UNPACKED_BYTES - 1000))
    assert len(message.value) == MAX_UNPACKED_BYTES - 1000
