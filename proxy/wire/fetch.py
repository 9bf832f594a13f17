"""What a Fetch request asks for, and what a Fetch response says of each partition."""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import repeat, takewhile
from struct import Struct
from typing import NamedTuple, TypeAlias

from proxy.wire.apis import FETCH, is_known
from proxy.wire.layout import (
    Buffer,
    Fixed,
    Node,
    Record,
    Sized,
    read_tags,
    read_uvarint,
    record_of,
    request_layout,
)
from proxy.wire.malformed import MalformedFrame, MalformedResponse

__all__ = [
    "FINAL_EPOCH",
    "INITIAL_EPOCH",
    "NO_OFFSET",
    "NO_SESSION",
    "TOPIC_ID_BYTES",
    "FetchPosition",
    "FetchRequestPartitions",
    "FetchedPartition",
    "TopicKey",
    "leading_fields",
    "packing",
    "read_fetch_request",
]

TopicKey: TypeAlias = str | bytes
"""A topic's name; from Fetch version 13 on its id, 16 bytes."""

NO_SESSION = 0
"""As a session id. Epochs and session ids are those of KIP-227."""

INITIAL_EPOCH = 0
"""Of a full request that wants to begin a session."""

FINAL_EPOCH = -1
"""Of a full request without a session; one that it names is closed."""

NO_OFFSET = -1

TOPIC_ID_BYTES = 16

_NULL = -1
_INT32 = Struct(">i")
_CODES = {1: "b", 2: "h", 4: "i", 8: "q", 16: "16s"}
"""Of `struct`, by the size of a field."""


class FetchPosition(NamedTuple):
    """From where a partition is asked for. A tuple, because one is made for each partition."""

    topic: TopicKey
    partition: int

    offset: int
    """As the client wrote it."""


@dataclass(slots=True)
class FetchRequestPartitions:
    """What a Fetch request asks for. Not frozen, which would make it slower to make."""

    session_id: int
    """NO_SESSION before version 7."""

    session_epoch: int
    """FINAL_EPOCH before version 7."""

    positions: tuple[FetchPosition, ...]
    """In a full request all that is asked for, else what is new or has changed."""

    forgotten: tuple[tuple[TopicKey, int], ...]
    """Partitions that leave the session, applied after the positions; void in a full request."""

    @property
    def is_full(self) -> bool:
        """Whether the request names all that it asks for, not only what has changed."""
        return self.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH)


class FetchedPartition(NamedTuple):
    """What a Fetch response says of one partition. Offsets are -1 when it does not say."""

    topic: TopicKey
    partition: int

    error_code: int
    """0: none."""

    high_watermark: int

    last_stable_offset: int
    """From version 4 on."""

    log_start_offset: int
    """From version 5 on."""

    records_bytes: int

    end_offset: int | None
    """Behind the last whole record batch; None when there is none or the records were not seen."""


def read_fetch_request(version: int, body: Buffer) -> FetchRequestPartitions:
    """Return what a request asks for; `body` starts behind the request's header.

    Null arrays read as empty, a null name as the empty string. What follows the partitions is left
    to the broker to read.
    Raises MalformedFrame, and ValueError for a version that the schemas do not know.
    """
    form = _form(version)
    try:
        return form.read(body)
    except (IndexError, ValueError, struct.error, MalformedResponse) as error:
        raise MalformedFrame("bad_body", f"a Fetch request: {error}") from None


def packing(fields: Mapping[str, Node], wanted: Iterable[str]) -> Struct:
    """Return how to unpack the `wanted` ones of these fields of fixed size, in wire order.

    The others are passed over. Integers come out signed, ids as bytes.
    """
    parts = []
    for name, node in fields.items():
        if not isinstance(node, Fixed):
            raise TypeError(f"{name} has no fixed size")
        parts.append(_CODES[node.size] if name in wanted else f"{node.size}x")
    return Struct(">" + "".join(parts))


def leading_fields(record: Record) -> dict[str, Node]:
    """Return the fields of fixed size with which a record begins."""
    return dict(takewhile(lambda field: isinstance(field[1], Fixed), record.fields.items()))


@dataclass(frozen=True, slots=True)
class _Form:
    """How the requests of one version are read."""

    head: Struct
    """Up to the topics. Unpacks session id and epoch, where there are any."""

    position: Struct
    """Partition and offset; in flexible versions the first byte of the tag section, too."""

    topic_name: Sized | None
    """None: topics have ids."""

    flexible: bool
    has_forgotten: bool

    def read(self, body: Buffer) -> FetchRequestPartitions:
        """Raise IndexError, ValueError, struct.error or MalformedResponse for malformed bytes."""
        session_id, epoch = self.head.unpack_from(body) or (NO_SESSION, FINAL_EPOCH)
        view = memoryview(body)
        positions: list[FetchPosition] = []
        topics, pos = self._count(view, self.head.size)
        for _ in range(topics):
            topic, pos = self._topic(view, pos)
            pos = self._read_positions(view, pos, topic, positions)
        forgotten: list[tuple[TopicKey, int]] = []
        if self.has_forgotten:
            topics, pos = self._count(view, pos)
            for _ in range(topics):
                topic, pos = self._topic(view, pos)
                count, pos = self._count(view, pos)
                end = _checked(view, pos + count * _INT32.size)
                forgotten += [(topic, index) for (index,) in _INT32.iter_unpack(view[pos:end])]
                pos = self._skip_tags(view, end)
        return FetchRequestPartitions(session_id, epoch, tuple(positions), tuple(forgotten))

    def _read_positions(
        self, view: memoryview, pos: int, topic: TopicKey, positions: list[FetchPosition]
    ) -> int:
        """Read the partitions of one topic and return the position behind the topic."""
        count, pos = self._count(view, pos)
        form = self.position
        end = _checked(view, pos + count * form.size)
        if count == 1:  # most often, in a session
            index, offset, *tags = form.unpack_from(view, pos)
            positions.append(FetchPosition(topic, index, offset))
            pos = read_tags(view, end - 1)[1] if tags and tags[0] else end
        elif count:
            # Zipped to columns: indexes, offsets and, in flexible versions, sizes of tag sections.
            indexes, offsets, *tags = zip(*form.iter_unpack(view[pos:end]), strict=True)
            if tags and any(tags[0]):
                for _ in range(count):
                    index, offset, _ = form.unpack_from(view, pos)
                    positions.append(FetchPosition(topic, index, offset))
                    pos = read_tags(view, pos + form.size - 1)[1]
            else:  # no tagged fields, so each row lies where it was read
                positions += map(FetchPosition._make, zip(repeat(topic), indexes, offsets))
                pos = end
        return self._skip_tags(view, pos)

    def _count(self, view: memoryview, pos: int) -> tuple[int, int]:
        """Return an array's count and the position behind it; 0 for null."""
        if self.flexible:
            count, pos = read_uvarint(view, pos)
            count -= 1
        else:
            (count,) = _INT32.unpack_from(view, pos)
            pos += _INT32.size
        if not _NULL <= count <= len(view) - pos:  # no element takes less than a byte
            raise ValueError(f"an array of {count} elements in {len(view) - pos} bytes")
        return max(count, 0), pos

    def _topic(self, view: memoryview, pos: int) -> tuple[TopicKey, int]:
        """Return a topic's name or id and the position behind it."""
        if self.topic_name is None:
            end = _checked(view, pos + TOPIC_ID_BYTES)
            return bytes(view[pos:end]), end
        length = self.topic_name.length
        if length is None:
            size, pos = read_uvarint(view, pos)
            size -= 1
        else:
            (size,) = length.unpack_from(view, pos)
            pos += length.size
        if size < _NULL:
            raise ValueError(f"a topic name of {size} bytes")
        end = _checked(view, pos + max(size, 0))
        return str(view[pos:end], "utf-8"), end

    def _skip_tags(self, view: memoryview, pos: int) -> int:
        if not self.flexible:
            return pos
        return read_tags(view, pos)[1] if view[pos] else pos + 1


def _checked(view: memoryview, end: int) -> int:
    if end > len(view):
        raise IndexError(f"a field ends at byte {end} of {len(view)}")
    return end


@cache
def _form(version: int) -> _Form:
    if not is_known(FETCH, version):
        raise ValueError(f"no schema for Fetch version {version}")
    request = request_layout(FETCH, version)
    topic = record_of(request.fields["topics"])
    partition = record_of(topic.fields["partitions"])
    name = topic.fields.get("topic")
    assert name is None or isinstance(name, Sized)  # the schemas say so
    flexible = request.tags is not None
    position = packing(partition.fields, ("partition", "fetch_offset"))
    return _Form(
        head=packing(leading_fields(request), ("session_id", "session_epoch")),
        position=Struct(position.format + "B") if flexible else position,
        topic_name=name,
        flexible=flexible,
        has_forgotten="forgotten_topics_data" in request.fields,
    )
