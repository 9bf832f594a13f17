"""What a Produce request appends to each partition, and where the response says it went.

From version 10 on a response may name brokers (KIP-951), so it has to be read to its end. Those of
one producer are alike, so one that differs from an earlier one in its offsets and times only is
recognised.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

from proxy.wire.apis import APIS, PRODUCE, RESPONSE_HEADER_BYTES
from proxy.wire.fetch import TopicKey
from proxy.wire.frames import (
    INT32,
    FrameShape,
    MalformedFrame,
    frame_shape,
    read_partitions,
    response_body_start,
    unreadable_is_malformed,
)
from proxy.wire.layout import (
    MAX_ELEMENTS,
    STEP_ELEMENTS,
    UNREADABLE,
    Buffer,
    request_partition_reader,
    response_layout,
    response_partition_reader,
    skip_tags,
)

_FIRST_VERSION = 3  # Kafka 4.0 has none below; the schemas begin here, too
_is_read = range(_FIRST_VERSION, APIS[PRODUCE].max_version + 1).__contains__
_HEADER = Struct(">qi4xb")  # offset, length, magic: at the same places in every format
BATCH_PREFIX_BYTES = 12
"""Of a record batch, offset and length, which the length does not count."""

BATCH_MAGIC = 2
MIN_BATCH_BYTES = 61
_MIN_MESSAGE_BYTES = 26
"""Whole, overhead included. Older message sets have magic 0 or 1."""

BATCH_HEAD = Struct(">qi4xb6xi")
"""Offset, length, magic, last offset delta: how long a record batch is, and where its offsets
end."""
BATCH_HEAD_BYTES = BATCH_HEAD.size
MAX_LOG_OFFSET = 2**63 - 1

MAX_SHAPES = 16
"""So many are remembered."""

MAX_SHAPE_BYTES = 4096
"""Longer responses are read each time."""

NO_TAGS = b"\0"


class ProducedPartition(NamedTuple):
    """What a request appends to one partition."""

    topic: TopicKey
    partition: int
    offsets: int
    """How many offsets its record batches take: its records, and gaps if there are any."""


class PartitionResponse(NamedTuple):
    """What a response says of one partition."""

    topic: TopicKey
    partition: int
    error_code: int
    """0: none."""
    base_offset: int
    """Of the first record; -1 when nothing was appended, or it had been before (a duplicate)."""


def read_produce_request(version: int, body: Buffer) -> tuple[ProducedPartition, ...]:
    """Return what a request appends; `body` is whole and starts behind the request's header.

    Of a partition's records the first batch is read: the broker refuses a further one, and all that
    are none. Nothing for versions that no schema here knows, and of more than MAX_ELEMENTS topics
    and partitions. Raises MalformedFrame.
    """
    if not _is_read(version):
        return ()
    fields = request_partition_reader(PRODUCE, version, "index")
    head, read_count, is_tagged = fields.head, fields.read_count, fields.is_tagged
    records = fields.partition.fields["records"]
    found, left = [], MAX_ELEMENTS
    try:
        topics, pos = read_count(body, fields.seek(body, 0))
        for _ in range(topics):
            topic, pos = fields.read_key(body, pos)
            partitions, pos = read_count(body, pos)
            left -= 1 + max(partitions, 0)
            if left < 0:
                return ()
            for _ in range(partitions):
                (index,) = head.unpack_from(body, pos)
                start, pos = records.content(body, pos + head.size)
                if pos - start >= MIN_BATCH_BYTES:
                    _, length, magic, delta = BATCH_HEAD.unpack_from(body, start)
                    is_whole = MIN_BATCH_BYTES <= BATCH_PREFIX_BYTES + length <= pos - start
                    if magic == BATCH_MAGIC and is_whole and delta >= 0:
                        found.append(ProducedPartition(topic, index, delta + 1))
                if is_tagged:
                    pos = skip_tags(body, pos)
            if is_tagged:
                pos = skip_tags(body, pos)
    except UNREADABLE as error:
        raise MalformedFrame("bad_body", f"a Produce request: {error}") from None
    return tuple(found)


def read_produced_bytes(
    version: int, body: Buffer, body_bytes: int
) -> Iterator[dict[TopicKey, int]]:
    """Yield how many bytes a request appends to each topic, of a few partitions at a time.

    `body` starts behind the request's header and may end before it has `body_bytes`: what is not
    there is taken for the last topic's, as is what cannot be read, which the broker refuses. None
    for versions that no schema here knows.
    """
    if not _is_read(version):
        return
    fields = request_partition_reader(PRODUCE, version, "index")
    read_count, is_tagged = fields.read_count, fields.is_tagged
    records, index_bytes = fields.partition.fields["records"], fields.head.size
    sizes: dict[TopicKey, int] = {}
    topic: TopicKey | None = None
    pos, left = 0, STEP_ELEMENTS
    try:
        topics, pos = read_count(body, fields.seek(body, 0))
        for _ in range(topics):
            topic, pos = fields.read_key(body, pos)
            sizes.setdefault(topic, 0)
            partitions, pos = read_count(body, pos)
            for _ in range(partitions):
                start, end = records.content(body, pos + index_bytes)
                sizes[topic] += end - start
                pos = skip_tags(body, end) if is_tagged else end
                left -= 1
                if not left:
                    yield sizes
                    sizes, left = {topic: 0}, STEP_ELEMENTS
            if is_tagged:
                pos = skip_tags(body, pos)
            if len(sizes) == STEP_ELEMENTS:
                yield sizes
                sizes, left = {}, STEP_ELEMENTS
    except UNREADABLE:
        if topic is not None:
            sizes[topic] = sizes.get(topic, 0) + max(body_bytes - pos, 0)
    yield sizes


def names_one_topic(version: int, body: Buffer) -> bool:
    """Return whether a request appends to one topic alone; `body` may end before the request."""
    if not _is_read(version):
        return False
    fields = request_partition_reader(PRODUCE, version, "index")
    try:
        return fields.read_count(body, fields.seek(body, 0))[0] == 1
    except UNREADABLE:
        return False


def read_produce_response(version: int, frame: Buffer) -> tuple[PartitionResponse, ...]:
    """Return what a response says of each partition; `frame` is whole, length included.

    Nothing for versions that no schema here knows. Raises MalformedResponse.
    """
    if not _is_read(version):
        return ()
    rows = read_partitions(PRODUCE, version, frame, ("index", "error_code", "base_offset"))
    return tuple([PartitionResponse(topic, *values) for topic, _, values in rows])


def read_batch_head(data: Buffer, start: int) -> tuple[int, int] | None:
    """Return the length of the record batch that begins there, and the offset behind it.

    None when it is none. Of a message set a message is taken for a batch. Needs BATCH_HEAD_BYTES.
    """
    offset, length, magic, delta = BATCH_HEAD.unpack_from(data, start)
    least = MIN_BATCH_BYTES if magic == BATCH_MAGIC else _MIN_MESSAGE_BYTES
    if not 0 <= magic <= BATCH_MAGIC or BATCH_PREFIX_BYTES + length < least or offset < 0:
        return None
    if magic != BATCH_MAGIC:
        delta = 0
    return (BATCH_PREFIX_BYTES + length, offset + delta + 1) if delta >= 0 else None


def next_offset_of_batches(data: Buffer, start: int, end: int) -> int | None:
    """Return the offset behind the last whole record batch in `data[start:end]`.

    Brokers cut off the last batch where the client's limit is: it does not count. Batches of
    control records count. None when there is no whole batch, and when the bytes are not record
    batches one after another. In message sets (magic 0 and 1) a message is taken for a batch; the
    offset of a compressed one is that of the last message in it.
    """
    found = None
    low = 0
    last_header = end - _HEADER.size
    while start <= last_header:
        offset, length, magic = _HEADER.unpack_from(data, start)
        after = start + BATCH_PREFIX_BYTES + length
        least = MIN_BATCH_BYTES if magic == BATCH_MAGIC else _MIN_MESSAGE_BYTES
        if not 0 <= magic <= BATCH_MAGIC or after - start < least or offset < low:
            return None
        if after > end:
            break
        delta = 0
        if magic == BATCH_MAGIC:
            delta = BATCH_HEAD.unpack_from(data, start)[-1]
            if delta < 0:
                return None
        found = low = offset + delta + 1
        if found > MAX_LOG_OFFSET:
            return None
        start = after
    return found


@dataclass(slots=True, eq=False)
class AddressFreeResponseShapes:
    """The responses on one connection that named no broker.

    One that equals such a one, but for numbers, names none.
    """

    _by_version: dict[int, list[FrameShape]] = field(default_factory=dict)

    def knows(self, version: int, frame: memoryview) -> bool:
        """Return whether a whole response is like one that named no broker."""
        number = int.from_bytes(frame, "big")
        return any(
            len(mask) == len(frame)
            and number & int.from_bytes(mask, "big") == int.from_bytes(content, "big")
            for mask, content in self._by_version.get(version, ())
        )

    def learn(self, version: int, frame: bytes) -> None:
        """Remember a whole response if it names no broker. Raises MalformedResponse."""
        room = MAX_SHAPES - sum(map(len, self._by_version.values()))
        if not room or len(frame) > MAX_SHAPE_BYTES or self.knows(version, memoryview(frame)):
            return
        with unreadable_is_malformed():
            layout = response_layout(PRODUCE, version)
            fields = response_partition_reader(PRODUCE, version)
            pos = response_body_start(PRODUCE, version, frame)
            if frame[layout.seek(None, frame, pos) :] != NO_TAGS:
                return
            throttle_at = layout.seek("throttle_time_ms", frame, pos)
            numbers_at = fields.partition.seek("base_offset", b"", 0)
            numbers = bytes(fields.head.size - numbers_at)
            changes = [(row + numbers_at, numbers) for _, row, _ in fields.read(frame, pos)]
        changes += (0, bytes(RESPONSE_HEADER_BYTES)), (throttle_at, bytes(INT32.size))
        self.pairs(version).append(frame_shape(frame, changes))

    def pairs(self, version: int) -> list[FrameShape]:
        """Return the shapes of a version, without the numbers.

        The list grows, to MAX_SHAPES at most.
        """
        return self._by_version.setdefault(version, [])
