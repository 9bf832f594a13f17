"""What stands in the topic of the state, without a broker."""

import gzip
import tracemalloc
from struct import pack
from types import SimpleNamespace

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from proxy.state import Record, StateError
from proxy.state.kafka.messages import (
    MAX_HEADERS,
    MAX_UNPACKED_BYTES,
    OWNER_KEY,
    StateOwner,
    decode_batches,
    read_message,
    to_message,
)
from proxy.state.kafka.state_topic import StateTopic
from proxy.wire.layout import encode_uvarint


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


def varint(number: int) -> bytes:
    """Return a number as records have them."""
    return encode_uvarint(2 * number)


def batch(payload: bytes, count: int, codec: int = 0, magic: int = 2) -> SimpleNamespace:
    """Return a partition that was fetched: a batch that says that it has so many messages."""
    counted = pack(">hiqqqhii", codec, count - 1, 0, 0, -1, -1, -1, count) + payload
    start = pack(">qiibI", 0, len(counted) + 9, 0, magic, calc_crc32c(counted))
    return SimpleNamespace(partition_index=0, records=start + counted)


def with_length(length: int) -> SimpleNamespace:
    """Return a partition that was fetched: a batch that claims to be so long."""
    return SimpleNamespace(partition_index=0, records=pack(">qi", 0, length) + bytes(100))


EMPTY_MESSAGE = bytes([12, 0, 0, 0, 1, 1, 0])
"""Its length, attributes, time and offset, no key, no value, no headers."""
MANY = 1_000_000
MANY_HEADERS = varint(MANY) + bytes(2 * MANY)
HEADED = bytes([0, 0, 0, 1, 1]) + MANY_HEADERS
CUT_OFF = EMPTY_MESSAGE[:-1]


@pytest.mark.parametrize(
    ("part", "finding"),
    [
        (batch(gzip.compress(EMPTY_MESSAGE * MANY), MANY, codec=1), "it has more than 100000"),
        (batch(EMPTY_MESSAGE, 2), "index out of"),
        (batch(CUT_OFF, 1), "index out of"),
        (batch(EMPTY_MESSAGE[:1] + bytes([0, 0, 0, 1, 8, 65, 0]), 1), "index out of"),
        (batch(bytes([12]) + b"\xff" * 20, 1), "a varint has more than 64 bits"),
        (batch(bytes([1, 0, 0, 0, 1, 1, 0]), 1), "runs over its end"),
        (batch(EMPTY_MESSAGE, 1, codec=2), "compressed otherwise than with gzip"),
        (batch(EMPTY_MESSAGE, 1, codec=3), "compressed otherwise than with gzip"),
        (batch(EMPTY_MESSAGE, 1, codec=4), "compressed otherwise than with gzip"),
        (batch(EMPTY_MESSAGE, 1, magic=1), "it is no record batch"),
        (with_length(-12), "it is no record batch"),
        (with_length(-(2**31)), "it is no record batch"),
        (with_length(0), "it is no record batch"),
    ],
)
def test_what_is_no_batch_of_ours_is_told_with_its_place(part, finding):
    with pytest.raises(StateError, match="the batch at offset 0 of topic t") as caught:
        [list(messages) for _, messages in decode_batches("t", part)]
    assert finding in caught.value.what


def test_of_a_message_with_a_million_headers_only_the_first_are_read():
    ((_, messages),) = decode_batches("t", batch(varint(len(HEADED)) + HEADED, 1))
    (message,) = messages
    assert message.headers == [("", b"")] * MAX_HEADERS
    with pytest.raises(StateError, match="was not written by quota-proxy"):
        read_message("t", 0, message._replace(value=b""))


@pytest.mark.parametrize("length", [2**31 - 1, 101])
def test_a_batch_that_is_cut_off_is_not_read(length):
    assert not list(decode_batches("t", with_length(length)))
