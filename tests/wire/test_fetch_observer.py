"""What is told of a Fetch response while it passes, with kafka-python's decoder as the oracle."""

from random import Random
from struct import pack, pack_into
from typing import NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.record import MemoryRecords, MemoryRecordsBuilder

from proxy.wire.apis import APIS, FETCH
from proxy.wire.fetch_response import MAX_NAME_BYTES, MAX_UNSHOWN, FetchWalker
from proxy.wire.frames import MalformedResponse
from proxy.wire.layout import MAX_TOPIC_BYTES
from proxy.wire.produce import next_offset_of_batches

RESPONSE = APIS[FETCH].response
VERSIONS = range(RESPONSE.max_version + 1)
FIRST_SESSIONS = 7
FIRST_TAGGED = 12
FIRST_IDS = 13
FIRST_ENDPOINTS = 16
EXAMPLES = 25
MAX_HEAD_BYTES = 64
GZIP = 1
NOT_CONTROL, CONTROL = 0, 0x20
ATTRIBUTES_AT = 22

INT16 = st.integers(-(2**15), 2**15 - 1)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=200)


# Record batches


def batch(magic, base, count, compression=0, control=NOT_CONTROL):
    """One batch of `count` records from offset `base`; as many messages for magic 0 and 1."""
    first = base if magic < 2 else 0
    builder = MemoryRecordsBuilder(magic, compression, 1 << 20, offset=first)
    for n in range(count):
        builder.append(1000, b"key", b"value" * n)
    builder.close()
    data = bytearray(builder.buffer())
    if magic == 2:
        pack_into(">q", data, 0, base)
        data[ATTRIBUTES_AT] |= control
    elif compression:
        pack_into(">q", data, 0, base + count - 1)
    return bytes(data)


def end_of(records):
    """What the oracle says: the offset behind the last whole batch."""
    end = None
    batches = MemoryRecords(records or b"")
    while (found := batches.next_batch()) is not None:
        end = found.next_offset if found.magic == 2 else found.base_offset + 1
    return end


@st.composite
def batches(draw):
    """Batches one after another, with gaps as after compaction; the last may be cut off."""
    magic = draw(st.sampled_from([0, 1, 2, 2, 2]))
    base = draw(st.integers(0, 2**62))
    out = b""
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(1, 4))
        compression = draw(st.sampled_from([0, GZIP]))
        control = draw(st.sampled_from([NOT_CONTROL, CONTROL]))
        out += batch(magic, base, count, compression, control)
        base += count + draw(st.sampled_from([0, 0, 5]))
    return out[: len(out) - draw(st.integers(0, min(len(out), 150)))]


@settings(max_examples=300, deadline=None)
@given(records=batches(), before=st.binary(max_size=5), behind=st.binary(max_size=40))
def test_batches_end_where_the_oracle_says(records, before, behind):
    data = before + records + behind
    for form in (data, memoryview(data)):
        assert next_offset_of_batches(form, len(before), len(before) + len(records)) == end_of(
            records
        )


@settings(deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_have_an_end_or_none(data):
    end = next_offset_of_batches(data, 0, len(data))
    assert end is None or 0 < end < 2**63


def spoiled(offset, form, value, source=None):
    data = bytearray(batch(2, 10, 3) if source is None else source)
    pack_into(form, data, offset, value)
    return bytes(data)


GOOD = batch(2, 10, 3)
ENDS = {
    "nothing": (b"", None),
    "one batch": (GOOD, 13),
    "only a cut off batch": (GOOD[:-1], None),
    "only the start of a header": (GOOD[:16], None),
    "the last batch cut off": (GOOD + batch(2, 13, 5)[:-1], 13),
    "the last header cut off": (GOOD + batch(2, 13, 5)[:11], 13),
    "a control batch at the end": (GOOD + batch(2, 13, 1, control=CONTROL), 14),
    "a batch whose last records were compacted away": (spoiled(23, ">i", 9), 20),
    "the smallest message": (pack(">qiIbbii", 7, 14, 0, 0, 0, -1, -1), 8),
    "messages": (batch(1, 10, 3), 13),
    "compressed messages": (batch(1, 10, 3, GZIP), 13),
    "the last offset there is": (spoiled(0, ">q", 2**63 - 4), 2**63 - 1),
    "an offset too far": (spoiled(0, ">q", 2**63 - 3), None),
    "negative offset": (spoiled(0, ">q", -1), None),
    "negative length": (spoiled(8, ">i", -1), None),
    "negative length behind a whole batch": (GOOD + spoiled(8, ">i", -1), None),
    "shorter than its header": (spoiled(8, ">i", 48), None),
    "unknown magic": (spoiled(16, ">b", 3), None),
    "negative magic": (spoiled(16, ">b", -1), None),
    "negative delta": (spoiled(23, ">i", -1), None),
    "offsets that go back": (GOOD + batch(2, 12, 1), None),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends(name):
    data, end = ENDS[name]
    assert next_offset_of_batches(data, 0, len(data)) == end


# Responses


class Told(NamedTuple):
    """A topic and a FetchedPartition."""

    topic: str | bytes
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    records_bytes: int
    end_offset: int | None


class Seen:
    """Keeps what it is told."""

    def __init__(self):
        self.sessions = []
        self.told = []
        self.has_ended = False

    def session(self, error_code, session_id):
        assert not self.told
        self.sessions.append((error_code, session_id))

    def partitions(self, topic, fetched):
        assert not self.has_ended
        self.told += [Told(topic, *each) for each in fetched]

    def ended(self):
        assert not self.has_ended
        self.has_ended = True


PARTITION = st.fixed_dictionaries(
    {
        "partition_index": INT32,
        "error_code": INT16,
        "high_watermark": INT64,
        "last_stable_offset": INT64,
        "log_start_offset": INT64,
        "aborted": st.none() | st.lists(st.tuples(INT64, INT64), max_size=3),
        "records": st.none() | batches() | st.binary(max_size=300),
        "tags": st.sets(st.sampled_from(["diverging_epoch", "current_leader", "snapshot_id"])),
    }
)
TOPICS = st.lists(st.tuples(NAMES, st.uuids(), st.lists(PARTITION, max_size=4)), max_size=3)


def response_body(version, topics, session=(0, 0), nodes=0):
    topic_of = RESPONSE.FetchableTopicResponse
    message = RESPONSE(
        version=version,
        throttle_time_ms=5,
        error_code=session[0],
        session_id=session[1],
        responses=topics
        and [
            topic_of(
                version=version,
                partitions=[partition(version, **values) for values in partitions],
                **({"topic": name} if version < FIRST_IDS else {"topic_id": topic_id}),
            )
            for name, topic_id, partitions in topics
        ],
    )
    if nodes and version >= FIRST_ENDPOINTS:
        message.node_endpoints = [
            RESPONSE.NodeEndpoint(version=version, node_id=n, host="broker", port=9, rack=None)
            for n in range(nodes)
        ]
    return bytes(message.encode(version=version))


def partition(version, aborted=(), tags=(), **values):
    kind = RESPONSE.FetchableTopicResponse.PartitionData
    if version < 4:
        aborted = None
    made = kind(
        version=version,
        preferred_read_replica=-1,
        aborted_transactions=aborted
        and [
            kind.AbortedTransaction(version=version, producer_id=producer, first_offset=first)
            for producer, first in aborted
        ],
        **values,
    )
    if version >= FIRST_TAGGED:
        if "diverging_epoch" in tags:
            made.diverging_epoch = kind.EpochEndOffset(version=version, epoch=3, end_offset=4)
        if "current_leader" in tags:
            made.current_leader = kind.LeaderIdAndEpoch(
                version=version, leader_id=1, leader_epoch=2
            )
        if "snapshot_id" in tags:
            made.snapshot_id = kind.SnapshotId(version=version, end_offset=7, epoch=8)
    return made


def expected(version, body):
    """What the decoder says: sessions, and partitions without the ends of their batches."""
    message = RESPONSE.decode(body, version=version)
    sessions = [(message.error_code, message.session_id)] if version >= FIRST_SESSIONS else []
    return sessions, [
        Told(
            topic=(topic.topic or "") if version < FIRST_IDS else topic.topic_id.bytes,
            partition=part.partition_index,
            error_code=part.error_code,
            high_watermark=part.high_watermark,
            last_stable_offset=part.last_stable_offset if version >= 4 else -1,
            log_start_offset=part.log_start_offset if version >= 5 else -1,
            records_bytes=len(part.records or b""),
            end_offset=end_offset(part.records),
        )
        for topic in message.responses or ()
        for part in topic.partitions or ()
    ]


def feed_all(walker, data):
    walker.feed(data)
    walker.show()


def end_offset(records):
    return next_offset_of_batches(records, 0, len(records)) if records else None


def without_ends(partitions):
    return [fetched._replace(end_offset=None) for fetched in partitions]


def check_pieces(version, body, random, *, use_skip):
    """Feed random pieces to a walker."""
    seen = Seen()
    walker, taken = FetchWalker(version, len(body), seen), 0
    sessions, partitions = expected(version, body)
    cuts = sorted(random.randrange(len(body) + 1) for _ in range(random.randrange(12)))
    for cut in [*cuts, len(body)]:
        taken = advance(walker, body, taken, cut, random, use_skip=use_skip)
        walker.show()
        assert walker.is_done is seen.has_ended
        assert not walker.is_done or len(seen.told) == len(partitions)
    assert seen.has_ended
    assert seen.sessions == sessions
    assert without_ends(seen.told) == without_ends(partitions)
    for got, true in zip(seen.told, partitions, strict=True):
        assert got.end_offset in (None, true.end_offset)


def check_ends(version, body, random):
    """Feed random pieces to a walker that follows record batches."""
    seen = Seen()
    walker, taken = FetchWalker(version, len(body), seen, follows_batches=True), 0
    cuts = sorted(random.randrange(len(body) + 1) for _ in range(random.randrange(12)))
    for cut in [*cuts, len(body)]:
        taken = advance(walker, body, taken, cut, random, use_skip=True)
        walker.show()
    assert (seen.sessions, seen.told) == expected(version, body)


def advance(walker, body, taken, cut, random, *, use_skip):
    view = memoryview(body)
    while taken < cut:
        if use_skip and walker.opaque_bytes and random.random() < 0.7:
            moved = random.randint(1, min(walker.opaque_bytes, cut - taken))
            walker.skip(moved)
            taken += moved
        else:
            walker.feed(view[taken:cut])
            taken = cut
    return taken


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    topics=TOPICS | st.none(),
    session=st.tuples(INT16, INT32),
    nodes=st.integers(0, 3),
    random=st.randoms(use_true_random=False),
    use_skip=st.booleans(),
)
def test_it_is_told_what_the_decoder_reads(version, topics, session, nodes, random, use_skip):
    body = response_body(version, topics, session, nodes)
    whole = Seen()
    feed_all(FetchWalker(version, len(body), whole), body + b"the next response")
    assert (whole.sessions, whole.told) == expected(version, body)
    check_pieces(version, body, random, use_skip=use_skip)
    check_ends(version, body, random)


@pytest.mark.parametrize("version", VERSIONS)
def test_unknown_tags_and_null_arrays(filler, version):
    """Messages written without the codec, which would drop what it does not know."""
    for seed in range(40):
        body = filler(seed, unknown_tags=True).body(RESPONSE, version)
        check_pieces(version, body, Random(seed), use_skip=bool(seed % 2))


@pytest.mark.parametrize("version", VERSIONS)
def test_many_partitions(version):
    values = {"error_code": 0, "last_stable_offset": 4, "log_start_offset": 1}
    partitions = [
        {**values, "partition_index": n, "high_watermark": n, "records": batch(2, n, n % 4 + 1)}
        for n in range(300)
    ]
    body = response_body(version, [("orders", UUID(int=5), partitions)] * 2)
    seen = Seen()
    feed_all(FetchWalker(version, len(body), seen), body)
    assert seen.told == expected(version, body)[1]
    assert [fetched.end_offset for fetched in seen.told[:300]] == [
        n + n % 4 + 1 for n in range(300)
    ]
    for seed in range(5):
        check_pieces(version, body, Random(seed), use_skip=True)


def test_what_waits_to_be_shown_is_bounded():
    values = {"error_code": 0, "high_watermark": 9, "last_stable_offset": 4, "log_start_offset": 1}
    partitions = [{**values, "partition_index": n, "records": b""} for n in range(MAX_UNSHOWN + 9)]
    body = response_body(12, [("orders", None, partitions)])
    seen = Seen()
    walker = FetchWalker(12, len(body), seen)
    for pos in range(0, len(body), 100):
        walker.feed(body[pos : pos + 100])
    assert MAX_UNSHOWN <= len(seen.told) < len(partitions)
    walker.show()
    walker.show()
    assert [fetched.partition for fetched in seen.told] == list(range(len(partitions)))
    assert seen.has_ended


ONE = {
    "partition_index": 3,
    "error_code": 0,
    "high_watermark": 50,
    "last_stable_offset": 40,
    "log_start_offset": 1,
}
RECORDS = batch(2, 10, 3) + batch(2, 13, 5)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_end_is_told_only_when_all_records_are_in_the_same_bytes(version):
    body = response_body(version, [("orders", UUID(int=5), [{**ONE, "records": RECORDS}])])
    start = body.index(RECORDS)
    for cut in range(len(body) + 1):
        seen = Seen()
        walker = FetchWalker(version, len(body), seen)
        walker.feed(body[:cut])
        assert not seen.told, "not before it is time"
        walker.show()
        told = 1 if cut >= start else 0
        assert len(seen.told) == told, "told as soon as the length of the records is known"
        feed_all(walker, body[cut:])
        (fetched,) = seen.told
        in_one = cut < start or cut >= start + len(RECORDS)
        assert fetched.end_offset == (18 if in_one else None)
        assert fetched.records_bytes == len(RECORDS)


@pytest.mark.parametrize("version", VERSIONS)
def test_it_holds_back_no_more_than_fields_and_a_name(version):
    name = "orders" * 20
    body = response_body(version, [(name, UUID(int=5), [{**ONE, "records": RECORDS}])] * 2)
    walker = FetchWalker(version, len(body), Seen())
    pos = unseen = 0
    while pos < len(body):
        moved = walker.opaque_bytes
        if moved:
            walker.skip(moved)
            unseen += moved
        else:
            moved = 1
            walker.feed(body[pos : pos + 1])
        pos += moved
        assert len(walker.held) <= MAX_HEAD_BYTES + len(name)
    assert unseen >= 2 * len(RECORDS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("records", [RECORDS, b"", None], ids=["records", "empty", "null"])
def test_it_is_done_when_the_last_partition_is_told(version, records):
    parts = [{**ONE, "partition_index": n, "records": records} for n in range(2)]
    body = response_body(version, [("orders", UUID(int=5), parts)] * 2)
    seen = Seen()
    walker = FetchWalker(version, len(body), seen)
    for pos in range(len(body)):
        assert walker.is_done is (len(seen.told) == 4)
        feed_all(walker, body[pos : pos + 1])
    assert len(seen.told) == 4


def ends(version, body, step):
    """Walk in pieces of `step` bytes; return whether it comes to the end. False: malformed."""
    walker = FetchWalker(version, len(body), seen := Seen())
    try:
        for pos in range(0, len(body), step):
            feed_all(walker, body[pos : pos + step])
    except MalformedResponse:
        return False
    assert walker.is_done is seen.has_ended is bool(body)
    return True


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(body=st.binary(max_size=200), step=st.integers(1, 40))
def test_any_bytes_end_or_are_malformed(version, body, step):
    assert ends(version, body, step) is ends(version, body, len(body) + 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_spoiled_responses_end_or_are_malformed(filler, version):
    random = Random(version)
    for seed in range(100):
        body = bytearray(filler(seed, unknown_tags=True).body(RESPONSE, version))
        for _ in range(random.randint(1, 3)):
            body[random.randrange(len(body))] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
        spoilt = bytes(body)
        assert ends(version, spoilt, random.randint(1, 40)) is ends(version, spoilt, len(spoilt))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_body_cut_off_anywhere_is_malformed(version):
    body = response_body(version, [("orders", UUID(int=5), [{**ONE, "records": RECORDS}])])
    behind = len(body) - body.index(RECORDS) - len(RECORDS)
    for cut in range(1, len(body) - behind):
        for step in (1, len(body)):
            assert not ends(version, body[:cut], step)


@pytest.mark.parametrize("size", [-2, -(2**31), 5, 2**31 - 1])
def test_nothing_is_told_of_records_that_cannot_be(size):
    body = response_body(4, [("orders", None, [{**ONE, "records": b""}])])
    body = body[:-4] + pack(">i", size)
    seen = Seen()
    with pytest.raises(MalformedResponse):
        FetchWalker(4, len(body), seen).feed(body + bytes(10))
    assert seen.told == []


def test_a_count_does_not_go_on_in_the_next_response():
    body = bytes(10) + b"\x82"
    with pytest.raises(MalformedResponse):
        FetchWalker(12, len(body), Seen()).feed(body + bytes(100))


BAD_NAMES = {
    "not UTF-8": (pack(">h", 2) + b"\xff\xff", "not UTF-8"),
    "runs over the end": (pack(">h", 3000), "a length of"),
    "negative": (pack(">h", -2), "a length of"),
}


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(name):
    field, message = BAD_NAMES[name]
    body = bytes(4) + pack(">i", 1) + field + bytes(100)

    def walk(step):
        walker = FetchWalker(4, len(body), Seen())
        for pos in range(0, len(body), step):
            walker.feed(body[pos : pos + step])

    for step in (1, 1000):
        with pytest.raises(MalformedResponse, match=message):
            walk(step)


def test_a_name_that_is_too_long_is_not_waited_for():
    body = bytes(10) + b"\2" + b"\x81\x80\x02"  # one topic, a name of MAX_NAME_BYTES + 1 bytes
    walker = FetchWalker(12, 10**6, Seen())
    with pytest.raises(MalformedResponse, match=f"{MAX_NAME_BYTES + 1} bytes"):
        walker.feed(body)


@pytest.mark.parametrize(
    ("size", "is_kept"), [(MAX_TOPIC_BYTES, True), (MAX_TOPIC_BYTES + 1, False)]
)
def test_a_name_that_no_topic_can_have_is_not_kept(size, is_kept):
    name = "x" * size
    body = response_body(12, [(name, None, [{**ONE, "records": None}])])
    seen = Seen()
    feed_all(FetchWalker(12, len(body), seen), body)
    assert [fetched.topic for fetched in seen.told] == [name if is_kept else ""]


def test_a_longest_name_in_pieces():
    name = "x" * MAX_NAME_BYTES
    body = response_body(12, [(name, None, [{**ONE, "records": None}])])
    seen = Seen()
    walker = FetchWalker(12, len(body), seen)
    for pos in range(0, len(body), 4096):
        feed_all(walker, body[pos : pos + 4096])
    assert [fetched.topic for fetched in seen.told] == [""]
