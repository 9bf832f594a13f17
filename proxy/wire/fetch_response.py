"""Follow a Fetch response through its bytes without holding it.

Observers get what the response says of each partition. Only the fields for that are read, and
lengths and counts; everything between them is skipped, so that record data can go from socket to
socket unseen.
"""

from collections.abc import Callable, Generator, Sequence
from functools import cache
from struct import Struct
from typing import TypeAlias

from proxy.wire.apis import FETCH, ApiPlan
from proxy.wire.fetch import NO_OFFSET, FetchedPartition, TopicKey
from proxy.wire.frames import MalformedResponse
from proxy.wire.layout import (
    INCOMPLETE,
    MAX_TOPIC_BYTES,
    VARINT_MORE,
    VARINT_PAYLOAD,
    VARINT_PAYLOAD_BITS,
    Buffer,
    read_uvarint,
    response_layout,
)
from proxy.wire.produce import (
    BATCH_HEAD,
    BATCH_HEAD_BYTES,
    BATCH_MAGIC,
    BATCH_PREFIX_BYTES,
    MAX_LOG_OFFSET,
    MIN_BATCH_BYTES,
    next_offset_of_batches,
    read_batch_head,
)

MAX_NAME_BYTES = 2**15 - 1
"""Kafka's limit for all strings: of a topic's name, which is held back for an observer."""

MAX_UNSHOWN = 1000
"""So many partitions are shown although nobody said that now is the time."""

_HEAD_FIELDS = (
    *("partition_index", "error_code"),
    *("high_watermark", "last_stable_offset", "log_start_offset"),
)
_FURTHER_FIELDS = ("aborted_transactions", "preferred_read_replica", "records")
"""Of a partition, in wire order. Old versions lack some."""

ReadRows: TypeAlias = Callable[
    [Buffer, int, int, int, int, list[FetchedPartition]], tuple[int, int]
]
"""Called with a piece of the body: the bytes, where a partition begins, where the piece and where
the body ends. Then how many partitions the topic still has, and where to add them.

Returns how many it added, and the position behind the records of the last one. It adds those before
the first that is not like most, or whose fields are not all in the piece."""

_NONE = 1
"""The greatest length of an array or of bytes that has nothing in it, as a varint; 0: null."""
_TWO_PAYLOADS_BITS = 2 * VARINT_PAYLOAD_BITS
_LENGTH_BYTES_BEHIND = 2
"""The lengths of records that are read here have one byte, one more, or two more."""


def fetch_body_start(plan: ApiPlan, frame: Buffer, frame_bytes: int) -> int:
    """Return where the body of a Fetch response starts, whose header is in `frame`.

    Raises MalformedResponse where nothing is behind the header, or where it has tagged fields,
    which no broker has sent so far.
    """
    start = plan.body_offset
    if frame_bytes <= start:
        raise MalformedResponse(f"a Fetch response of {frame_bytes} bytes")
    if plan.is_flexible and frame[start - 1]:
        raise MalformedResponse("a response header with tagged fields")
    return start


class FetchObserver:
    """Gets what a response says. The walker's bytes do not depend on it."""

    __slots__ = ()

    def session(self, error_code: int, session_id: int) -> None:
        """Take what is said of the whole response, before any partition; from version 7 on."""

    def partitions(self, topic: TopicKey, fetched: Sequence[FetchedPartition]) -> None:
        """Take partitions of a topic, in the order of the response, once each."""

    def ended(self) -> None:
        """Record that all partitions were shown."""


class FetchWalker:
    """Reads a Fetch response's body piece by piece, and shows observers what it says.

    It holds no more than the start of a field, a topic's name, and copies of the fields until they
    are shown. That is when `show` is called, so that what was fed can be sent on first.
    """

    __slots__ = (
        *("_form", "_is_told", "_left_bytes", "_observers", "_topics", "_walk"),
        *("held", "is_done", "opaque_bytes"),
    )

    def __init__(
        self,
        version: int,
        body_bytes: int,
        *observers: FetchObserver,
        follows_batches: bool = False,
    ) -> None:
        """Start at a body of this length: what the frame has behind its header.

        `follows_batches`: the heads of record batches are read, so that observers get where a
        partition's records end also when they are not all in one piece. Raises ValueError for a
        version that the schemas do not know.
        """
        self._form = fetch_form(version)
        self._observers = observers
        self._left_bytes = body_bytes
        """Of the body, behind what was fed and skipped."""
        self.opaque_bytes = 0
        """How many of the next bytes need not be shown and may be passed over with `skip`."""
        self.held = b""
        """The start of a field whose rest has not come."""
        self.is_done = False
        """Whether nothing to be shown is in what is left, which may pass unread."""
        self._topics: _FetchedTopics = []
        """What is not yet shown. The last is the topic that the walk is at."""
        self._is_told = False
        self._walk = _walk(self._form, observers, self._topics, follows_batches=follows_batches)
        next(self._walk)

    def skip(self, count: int) -> None:
        """Pass over `count` bytes, at most `opaque_bytes`, that were moved unseen."""
        if not 0 <= count <= self.opaque_bytes:
            raise ValueError(f"cannot skip {count} of {self.opaque_bytes} bytes")
        self.opaque_bytes -= count
        self._left_bytes -= count

    def feed(self, data: Buffer) -> None:
        """Take the next bytes of the body, in pieces of any size. Opaque bytes may be among them.

        The walk refers to the piece until the next one. Raises MalformedResponse, after which the
        walker is of no more use.
        """
        if self.is_done:
            return
        if held := self.held:
            data = held + bytes(data)
            self.held = b""
        limit = self._left_bytes + len(held)
        end = min(len(data), limit)
        self._left_bytes = limit - end
        opaque = self.opaque_bytes
        if opaque >= end and 0 < end < limit:
            self.opaque_bytes = opaque - end
            return
        try:
            pos = self._walk.send((data, opaque, end, limit))
        except StopIteration as stop:
            pos = stop.value
            self.is_done = True
        if pos > limit or (end == limit and not self.is_done):
            raise MalformedResponse("the response ends inside a field")
        self.opaque_bytes = max(pos - end, 0)
        if pos < end and not self.is_done:
            self.held = bytes(data[pos:end])
        unshown = sum([len(fetched) or 1 for _, fetched in self._topics])
        if unshown >= MAX_UNSHOWN and not self.is_done:
            self.show()

    def show(self) -> None:
        """Show the observers what was fed since the last time."""
        for topic, fetched in self._topics:
            if fetched:
                for observer in self._observers:
                    observer.partitions(topic, fetched[:])
                fetched.clear()
        del self._topics[:-1]
        if self.is_done and not self._is_told:
            self._is_told = True
            for observer in self._observers:
                observer.ended()


_FetchedTopics: TypeAlias = list[tuple[TopicKey, list[FetchedPartition]]]

_Piece: TypeAlias = tuple[Buffer, int, int, int]
"""Bytes of the body and, as positions in them: where to go on, which may be behind their end; their
end; the end of the body."""

_ReadNumber: TypeAlias = Callable[[Buffer, int, int, int], tuple[int, int] | None]
"""Called with a piece. Returns a length or count, and the position behind it; None when it is not
all there. Raises MalformedResponse, also when the body has no room for so much."""


def _walk(  # noqa: PLR0912, PLR0915 - in one piece, from top to bottom as the schema has it
    form: "_Form",
    observers: Sequence[FetchObserver],
    found: _FetchedTopics,
    *,
    follows_batches: bool,
) -> Generator[int, _Piece, int]:
    """Follow a body from field to field; return the position behind its last partition's records.

    Yields the position from which on it needs bytes that have not come, and is sent the next piece.
    """
    count, head_bytes = form.count, form.head.size
    read_rows = None if follows_batches else form.read_rows
    data, pos, end, limit = yield 0
    # throttle_time_ms, error_code, session_id
    while pos + form.session.size > end:
        data, pos, end, limit = yield pos
    if form.has_session:
        for observer in observers:
            observer.session(*form.session.unpack_from(data, pos))
    pos += form.session.size
    # responses
    while (number := count(data, pos, end, limit)) is None:
        data, pos, end, limit = yield pos
    topics, pos = number
    for topics_left in range(topics, 0, -1):
        # topic_id, or topic
        topic_bytes = form.topic_bytes
        if form.name_size is not None:
            while (number := form.name_size(data, pos, end, limit)) is None:
                data, pos, end, limit = yield pos
            topic_bytes, pos = max(number[0], 0), number[1]
        if topic_bytes > MAX_NAME_BYTES:
            raise MalformedResponse(f"a topic name of {topic_bytes} bytes")
        while pos + topic_bytes > end:
            data, pos, end, limit = yield pos
        key = bytes(data[pos : pos + topic_bytes])
        fetched: list[FetchedPartition] = []
        found.append((key if form.name_size is None else _decoded(key), fetched))
        pos += topic_bytes
        # partitions
        while (number := count(data, pos, end, limit)) is None:
            data, pos, end, limit = yield pos
        partitions, pos = number
        while partitions > 0:
            rows = 0
            if read_rows is not None:
                rows, pos = read_rows(data, pos, end, limit, partitions, fetched)
            if rows:  # up to the tag section of the last of them
                partitions -= rows
            else:
                partitions -= 1
                # partition_index, error_code, high_watermark, last_stable_offset, log_start_offset
                while pos + head_bytes > end:
                    data, pos, end, limit = yield pos
                head: tuple[int, ...] = form.head.unpack_from(data, pos)
                pos += head_bytes
                # aborted_transactions
                if form.aborted_bytes:
                    while (number := count(data, pos, end, limit)) is None:
                        data, pos, end, limit = yield pos
                    aborted, pos = number
                    if not form.is_tagged:  # at once: it may claim to have a thousand million
                        pos += max(aborted, 0) * form.aborted_bytes
                    for _ in range(aborted if form.is_tagged else 0):
                        pos += form.aborted_bytes
                        data, pos, end, limit = yield from _skip_tags(data, pos, end, limit)
                # preferred_read_replica
                pos += form.replica_bytes
                # records
                while (number := form.records_size(data, pos, end, limit)) is None:
                    data, pos, end, limit = yield pos
                records_bytes, pos = max(number[0], 0), number[1]
                after = pos + records_bytes
                index, error_code, high, stable, start = *head, *form.absent
                last = (
                    next_offset_of_batches(data, pos, after)
                    if records_bytes and after <= end
                    else None
                )
                if follows_batches and after > end:
                    piece, last = yield from _follow_batches(data, pos, end, limit, records_bytes)
                    data, after, end, limit = piece
                fetched.append((index, error_code, high, stable, start, records_bytes, last))
                pos = after
            if form.is_tagged and (partitions or topics_left > 1):
                data, pos, end, limit = yield from _skip_tags(data, pos, end, limit)
        if form.is_tagged and topics_left > 1:
            data, pos, end, limit = yield from _skip_tags(data, pos, end, limit)
    return pos


def _skip_tags(data: Buffer, pos: int, end: int, limit: int) -> Generator[int, _Piece, _Piece]:
    """Follow the walk through a tag section; return the piece at whose position it ends."""
    while (found := _read_number(data, pos, end, limit)) is None:
        data, pos, end, limit = yield pos
    fields, pos = found
    for _ in range(fields):
        while (found := _read_tag_number(data, pos, end, limit)) is None:
            data, pos, end, limit = yield pos
        pos = found[1]
        while (found := _read_number(data, pos, end, limit)) is None:
            data, pos, end, limit = yield pos
        pos = found[0] + found[1]
    return data, pos, end, limit


def _follow_batches(
    data: Buffer, pos: int, end: int, limit: int, records_bytes: int
) -> Generator[int, _Piece, tuple[_Piece, int | None]]:
    """Follow the walk through records; return the piece at whose position they end.

    With it comes the offset behind the last whole batch, as `next_offset_of_batches` returns it.
    """
    left, last = records_bytes, None
    while left >= BATCH_HEAD_BYTES:
        while pos + BATCH_HEAD_BYTES > end:
            data, pos, end, limit = yield pos
        batch = read_batch_head(data, pos)
        if batch is None:
            last = None
            break
        batch_bytes, batch_end = batch
        if batch_bytes > left:
            break
        last = batch_end
        pos += batch_bytes
        left -= batch_bytes
    return (data, pos + left, end, limit), last


def _decoded(name: bytes) -> str:
    """Return a topic's name; empty for one that no topic can have."""
    try:
        return name.decode() if len(name) <= MAX_TOPIC_BYTES else ""
    except UnicodeDecodeError as error:
        raise MalformedResponse(f"a topic name is not UTF-8: {error}") from None


def _number(read: Callable[[Buffer, int], tuple[int, int]], *, is_size: bool = True) -> _ReadNumber:
    """Return how to read a number; one that `is_size` needs so many bytes behind it, at least."""

    def read_number(data: Buffer, pos: int, end: int, limit: int) -> tuple[int, int] | None:
        if pos >= end:
            return None
        try:
            number, after = found = read(data, pos)
        except INCOMPLETE:
            return None
        except ValueError as error:
            raise MalformedResponse(str(error)) from None
        if after > end:
            return None
        if is_size and number > limit - after:
            raise MalformedResponse(f"a length of {number} with {limit - after} bytes left")
        return found

    return read_number


_read_number = _number(read_uvarint)
_read_tag_number = _number(read_uvarint, is_size=False)


def partition_row_reader(head: Struct, replica_bytes: int) -> ReadRows:
    """Return how to read many partitions at once, of those that are like most of them.

    Such a one has no aborted transactions, less than 2 MiB of records, and no tagged fields. From
    version 12 on all in front of its records has the same size, then, but for their length. The
    others, and those of older versions, are left to the walk from field to field. `head` has all
    fields up to the aborted transactions; `replica_bytes` are behind these.
    """
    form = Struct(f"{head.format}B{replica_bytes}xB{_LENGTH_BYTES_BEHIND}B")
    unpack, form_bytes = form.unpack_from, form.size
    least_bytes = form_bytes - _LENGTH_BYTES_BEHIND
    unpack_batch = BATCH_HEAD.unpack_from

    def read_rows(
        data: Buffer, pos: int, end: int, limit: int, most: int, rows: list[FetchedPartition]
    ) -> tuple[int, int]:
        at, last = pos, end - form_bytes
        for found in range(most):
            if at > last:
                return found, pos
            index, error, high, stable, start, aborted, size, second, third = unpack(data, at)
            at += least_bytes
            if aborted > _NONE:
                return found, pos
            if size >= VARINT_MORE:
                size = size & VARINT_PAYLOAD | (second & VARINT_PAYLOAD) << VARINT_PAYLOAD_BITS
                at += 1
                if second >= VARINT_MORE:
                    if third >= VARINT_MORE:
                        return found, pos
                    size |= third << _TWO_PAYLOADS_BITS
                    at += 1
            if size:
                size -= 1
            after = at + size
            if after > limit:
                return found, pos
            last_end = None
            if size and after <= end:
                if size >= MIN_BATCH_BYTES:
                    offset, length, magic, delta = unpack_batch(data, at)
                    if (  # one batch and nothing else
                        length == size - BATCH_PREFIX_BYTES
                        and magic == BATCH_MAGIC
                        and offset >= 0
                        and delta >= 0
                        and offset + delta < MAX_LOG_OFFSET
                    ):
                        last_end = offset + delta + 1
                if last_end is None:
                    last_end = next_offset_of_batches(data, at, after)
            rows.append((index, error, high, stable, start, size, last_end))
            pos = after
            if pos >= end or data[pos]:
                return found + 1, pos
            at = pos + 1
        return most, pos

    return read_rows


class _Form:
    """How the responses of one version are written. Raises ValueError where there is no schema."""

    def __init__(self, version: int) -> None:
        response = response_layout(FETCH, version)
        topics = response.fields["responses"]
        topic, partition = topics.element, topics.element.fields["partitions"].element
        unknown = partition.fields.keys() - {*_HEAD_FIELDS, *_FURTHER_FIELDS}
        if unknown:
            raise TypeError(f"no way to walk through {unknown} of Fetch version {version}")
        self.is_tagged = response.tags is not None
        """Aborted transactions, partitions and topics end with tag sections."""
        self.has_session = "session_id" in response.fields
        self.session = response.head("error_code", "session_id")
        """All in front of the topics."""
        self.count = _number(topics.length.read)
        """Reads how many topics, partitions, or aborted transactions there are."""
        self.topic_bytes = topic.head().size
        """Of a topic's id; 0 if it has a name."""
        name = topic.fields.get("topic")
        self.name_size = _number(name.length.read) if name is not None else None
        self.head = partition.head(*_HEAD_FIELDS)
        self.absent = (NO_OFFSET,) * len(set(_HEAD_FIELDS) - partition.fields.keys())
        """In place of the last ones of these fields, which old versions lack."""
        aborted = partition.fields.get("aborted_transactions")
        self.aborted_bytes = aborted.element.head().size if aborted is not None else 0
        """Of each aborted transaction, without its tag section; 0 if the version has none."""
        replica = partition.fields.get("preferred_read_replica")
        self.replica_bytes = replica.form.size if replica is not None else 0
        self.records_size = _number(partition.fields["records"].length.read)
        self.read_rows: ReadRows | None = None
        """Reads the usual partitions; None where they are not written as it expects."""
        if self.is_tagged and not self.absent:
            self.read_rows = partition_row_reader(self.head, self.replica_bytes)


fetch_form = cache(_Form)
