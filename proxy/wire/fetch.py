"""What a Fetch request asks for, and what a Fetch response says of each partition."""

from dataclasses import dataclass
from functools import cache
from itertools import repeat
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from proxy.wire.apis import FETCH
from proxy.wire.layout import UNREADABLE, Buffer, request_layout, skip_tags
from proxy.wire.malformed import MalformedFrame

TopicKey: TypeAlias = str | bytes
"""A topic's name; from Fetch version 13 on its id, 16 bytes."""

NO_SESSION = 0
"""As a session id. Epochs and session ids are those of KIP-227."""

INITIAL_EPOCH = 0
"""Of a full request that wants to begin a session."""

FINAL_EPOCH = -1
"""Of a full request without a session; one that it names is closed."""

NO_OFFSET = -1

_INT32 = Struct(">i")


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
        return form.read(memoryview(body))
    except UNREADABLE as error:
        raise MalformedFrame("bad_body", f"a Fetch request: {error}") from None


@dataclass(frozen=True, slots=True)
class _RequestForm:
    """How the requests of one version are read, up to the end of their partitions."""

    head: Struct
    """Up to the topics. Unpacks session id and epoch, where there are any."""

    topics: Any
    topic: Any
    partitions: Any
    """Layouts of the array, of a topic's name or id, of its array of partitions."""

    row: Struct
    """Partition and offset; in flexible versions the first byte of the tag section, too."""

    is_flexible: bool
    has_forgotten: bool

    def read(self, view: memoryview) -> FetchRequestPartitions:
        session_id, epoch = self.head.unpack_from(view) or (NO_SESSION, FINAL_EPOCH)
        positions: list[FetchPosition] = []
        topics, pos = self.topics.count(view, self.head.size)
        for _ in range(topics):
            topic, pos = self.topic.read(view, pos)
            pos = self._read_partitions(view, pos, topic, positions)
            if self.is_flexible:
                pos = skip_tags(view, pos)
        forgotten: list[tuple[TopicKey, int]] = []
        if self.has_forgotten:
            topics, pos = self.topics.count(view, pos)
            for _ in range(topics):
                topic, pos = self.topic.read(view, pos)
                count, pos = self.partitions.count(view, pos)
                end = _checked(view, pos + count * _INT32.size)
                forgotten += [(topic, index) for (index,) in _INT32.iter_unpack(view[pos:end])]
                pos = skip_tags(view, end) if self.is_flexible else end
        return FetchRequestPartitions(session_id, epoch, tuple(positions), tuple(forgotten))

    def _read_partitions(
        self, view: memoryview, pos: int, topic: TopicKey, positions: list[FetchPosition]
    ) -> int:
        """Read the partitions of one topic, all at once if none of them has tagged fields."""
        count, pos = self.partitions.count(view, pos)
        row = self.row
        end = _checked(view, pos + count * row.size)
        if count == 1:  # most often, in a session
            index, offset, *tags = row.unpack_from(view, pos)
            positions.append(FetchPosition(topic, index, offset))
            return skip_tags(view, end - 1) if tags else end
        if count == 0:
            return pos
        # Zipped to columns: indexes, offsets and, in flexible versions, sizes of tag sections.
        indexes, offsets, *tags = zip(*row.iter_unpack(view[pos:end]), strict=True)
        if not (tags and any(tags[0])):
            positions += map(FetchPosition._make, zip(repeat(topic), indexes, offsets))
            return end
        for _ in range(count):
            index, offset, _ = row.unpack_from(view, pos)
            positions.append(FetchPosition(topic, index, offset))
            pos = skip_tags(view, pos + row.size - 1)
        return pos


def _checked(view: memoryview, end: int) -> int:
    if end > len(view):
        raise IndexError(f"a field ends at byte {end} of {len(view)}")
    return end


@cache
def _form(version: int) -> _RequestForm:
    request = request_layout(FETCH, version)
    topics = request.fields["topics"]
    topic, partitions = topics.element.fields.values()
    is_flexible = request.tags is not None
    row = partitions.element.head("partition", "fetch_offset")
    return _RequestForm(
        head=request.head("session_id", "session_epoch"),
        topics=topics,
        topic=topic,
        partitions=partitions,
        row=Struct(row.format + "B") if is_flexible else row,
        is_flexible=is_flexible,
        has_forgotten="forgotten_topics_data" in request.fields,
    )
