"""Follow a Fetch response through its bytes without holding it.

Only lengths and counts are read; everything between them is skipped, so that record data can go
from socket to socket unseen. What is looked for is the tag section at the end of the body: from
version 16 on it may carry broker addresses (KIP-951). An observer is also told what the response
says of each partition.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, Protocol, TypeAlias

from proxy.wire.apis import APIS, FETCH
from proxy.wire.fetch import (
    NO_OFFSET,
    FetchedPartition,
    TopicKey,
    leading_fields,
    packing,
)
from proxy.wire.layout import (
    MAX_UVARINT_BYTES,
    Array,
    Buffer,
    Fixed,
    Node,
    Record,
    Sized,
    TagSection,
    read_tags,
    read_uvarint,
    response_layout,
    write_uvarint,
)
from proxy.wire.malformed import MalformedResponse
from proxy.wire.produce import end_of_batches

NULL = -1
"""As a length or count."""

MAX_NAME_BYTES = 2**15 - 1
"""Of a topic's name, which is held back for an observer; Kafka's limit for all strings."""

_ONE_BYTE_VARINT = 0x80
_INT32 = Struct(">i")

_SESSION_FIELDS = ("error_code", "session_id")
_PARTITION_FIELDS = (
    "partition_index",
    "error_code",
    "high_watermark",
    "last_stable_offset",
    "log_start_offset",
)
"""In wire order. Old versions lack the last ones."""


class FetchObserver(Protocol):
    """Who is told what a response says. The walker's bytes do not depend on it."""

    def session(self, error_code: int, session_id: int) -> None:
        """Learn of the whole response, before any partition; from version 7 on."""

    def partition(self, fetched: FetchedPartition) -> None:
        """Learn of a partition as soon as the length of its records is known; once for each."""


class Telling:
    """What has to be kept from step to step so that an observer can be told."""

    __slots__ = ("head", "observer", "told", "topic")

    def __init__(self, observer: FetchObserver) -> None:
        self.observer = observer
        self.topic: TopicKey = ""
        self.head: tuple[int, ...] = ()
        """The first fields of the partition."""
        self.told = False
        """Whether the observer was told of a partition, and no further one has begun, or topic."""

    def tell_partition(self, size: int, data: Buffer, pos: int, end: int) -> None:
        """Tell of the partition whose `size` bytes of records begin at `pos`."""
        head = self.head
        if len(head) < len(_PARTITION_FIELDS):
            head += (NO_OFFSET,) * (len(_PARTITION_FIELDS) - len(head))
        whole = size > 0 and pos + size <= end
        end_offset = end_of_batches(data, pos, pos + size) if whole else None
        told = (self.topic, *head, max(size, 0), end_offset)
        self.told = True
        self.observer.partition(FetchedPartition._make(told))


Reader: TypeAlias = Callable[[Telling | None, Buffer, int, int, int], tuple[int, int] | None]
"""Called with the place to read at, with the end of what is there and the end of the body, all as
positions in the buffer. Returns a number and the position behind what was read; None when that is
not all there. Raises MalformedResponse. Only those who tell an observer need a Telling."""


def _varint(bias: int) -> Reader:
    """Return the reader of a varint to which `bias` is added."""

    def read(
        _telling: Telling | None, data: Buffer, pos: int, end: int, _limit: int
    ) -> tuple[int, int] | None:
        if pos < end and (byte := data[pos]) < _ONE_BYTE_VARINT:
            return byte + bias, pos + 1
        try:
            number, after = read_uvarint(data, pos)
        except IndexError:
            return None
        except ValueError as error:
            raise MalformedResponse(str(error)) from None
        return (number + bias, after) if after <= end else None

    return read


_read_varint = _varint(0)
_read_compact = _varint(NULL)
"""Of lengths and counts: the number + 1, 0 for null."""


@dataclass(frozen=True, slots=True)
class Step:
    """Either skip some bytes, or read a number and do something as many times."""

    skip_bytes: int = 0
    """0: read a number instead."""

    read: Reader = _read_varint

    program: tuple["Step", ...] | None = None
    """To be repeated; None: skip as many bytes. Empty: the number does not matter."""


@cache
def body_program(version: int, observed: bool) -> tuple[tuple[Step, ...], bool]:
    """Return the steps through a body up to its own tag section, and whether it has one.

    An observed program needs a Telling.
    """
    layout = response_layout(FETCH, version)
    tagged = layout.tags is not None
    steps = _observed(layout) if observed else tuple(map(_compile, layout.program))
    return steps[:-1] if tagged else steps, tagged


def _compile(node: Node) -> Step:
    match node:
        case Fixed(size):
            return Step(skip_bytes=size)
        case Sized(form):
            return Step(read=_length(form))
        case TagSection():
            return Step(program=_TAG_FIELD)
        case Array(compact, element):
            inner = element.program if isinstance(element, Record) else (element,)
            return _repeat(tuple(map(_compile, inner)), compact=compact)
    raise TypeError(f"no way to walk through {node}")


def _observed(record: Record) -> tuple[Step, ...]:
    """Return the same steps as the record's program, but what an observer is told is read."""
    head = leading_fields(record)
    steps = [_observed_head(head)] if head else []
    for name, node in list(record.fields.items())[len(head) :]:
        if isinstance(node, Sized) and name in _OBSERVED_SIZES:
            steps.append(Step(read=_OBSERVED_SIZES[name](_length(node.length))))
        elif isinstance(node, Array) and isinstance(node.element, Record):
            steps.append(_repeat(_observed(node.element), compact=node.compact))
        else:
            steps.append(_compile(node))
    if record.tags is not None:
        steps.append(_compile(TagSection()))
    return tuple(steps)


def _observed_head(fields: Mapping[str, Node]) -> Step:
    """Return the step through the fields of fixed size at the start of a record."""
    for name, (tell, told) in _OBSERVED_HEADS.items():
        if name in fields:
            return Step(read=_fields(packing(fields, told), tell))
    return Step(skip_bytes=packing(fields, ()).size)


def _repeat(program: tuple[Step, ...], *, compact: bool) -> Step:
    return Step(read=_length(None if compact else _INT32), program=program)


def _length(form: Struct | None) -> Reader:
    """Return the reader of a length or count; `form` is None for the compact ones."""
    return _read_compact if form is None else _number(form)


def _number(form: Struct) -> Reader:
    unpack, size = form.unpack_from, form.size

    def read(
        _telling: Telling | None, data: Buffer, pos: int, end: int, _limit: int
    ) -> tuple[int, int] | None:
        after = pos + size
        return (unpack(data, pos)[0], after) if after <= end else None

    return read


_TAG_FIELD = (Step(program=()), Step())
"""The field's number, then its size and value."""


def _fields(form: Struct, tell: Callable[[Telling, tuple[Any, ...]], None]) -> Reader:
    """Return the reader of several fields at once; nothing is to be skipped behind them."""
    unpack, size = form.unpack_from, form.size

    def read(
        telling: Telling | None, data: Buffer, pos: int, end: int, limit: int
    ) -> tuple[int, int] | None:
        after = pos + size
        if after <= end:
            assert telling is not None
            tell(telling, unpack(data, pos))
            return 0, after
        if after > limit:
            raise MalformedResponse(f"fields of {size} bytes with {limit - pos} left")
        return None

    return read


def _tell_session(telling: Telling, values: tuple[int, ...]) -> None:
    error_code, session_id = values
    telling.observer.session(error_code, session_id)


def _keep_topic_id(telling: Telling, values: tuple[bytes, ...]) -> None:
    (telling.topic,) = values
    telling.told = False


def _keep_head(telling: Telling, values: tuple[int, ...]) -> None:
    telling.head = values
    telling.told = False


_OBSERVED_HEADS: dict[str, tuple[Callable[[Telling, tuple[Any, ...]], None], tuple[str, ...]]] = {
    "session_id": (_tell_session, _SESSION_FIELDS),
    "topic_id": (_keep_topic_id, ("topic_id",)),
    "partition_index": (_keep_head, _PARTITION_FIELDS),
}
"""What to do with which fields of fixed size, if this one is among them."""


def _name(read_size: Reader) -> Reader:
    """Return the reader of a topic's name."""

    def read(
        telling: Telling | None, data: Buffer, pos: int, end: int, limit: int
    ) -> tuple[int, int] | None:
        found = read_size(telling, data, pos, end, limit)
        assert telling is not None
        if found is None:
            return None
        telling.told = False
        size, start = found
        after = start + size
        if size <= 0 or after > limit:
            telling.topic = ""
            return found
        if size > MAX_NAME_BYTES:
            raise MalformedResponse(f"a topic name of {size} bytes")
        if after > end:
            return None
        try:
            telling.topic = str(data[start:after], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedResponse(f"a topic name is not UTF-8: {error}") from None
        return 0, after

    return read


def _records(read_size: Reader) -> Reader:
    """Return the reader of the length of a partition's records."""

    def read(
        telling: Telling | None, data: Buffer, pos: int, end: int, limit: int
    ) -> tuple[int, int] | None:
        found = read_size(telling, data, pos, end, limit)
        if found is not None:
            size, start = found
            if NULL <= size <= limit - start:  # else it will be refused
                assert telling is not None
                telling.tell_partition(size, data, start, end)
        return found

    return read


_OBSERVED_SIZES = {"topic": _name, "records": _records}


FILLER_TAGS = (2**14 - 1, 2**21 - 1)
"""Numbers of the tagged field that fills the place of a removed one; clients skip numbers that they
do not know (KIP-482). Kafka counts up from 0, so these are far off. The first takes two bytes, the
second three: where one cannot make up a length in shortest form, the other can."""

_NODE_ENDPOINTS_TAG = 0


class FetchWalker:
    """Reads a Fetch response's body piece by piece, holding a few bytes and one entry per level.

    With an observer it also holds one topic's name, and copies of the fields that are told.
    """

    __slots__ = (
        *("_has_endpoints", "_partial", "_skip", "_stack", "_tagged", "_telling"),
        "remaining_bytes",
    )

    remaining_bytes: int
    """Of the body, behind what was fed and skipped. At the tail: the length of the tail."""

    def __init__(
        self, version: int, body_bytes: int, observer: FetchObserver | None = None
    ) -> None:
        """Start at a body of this length: what the frame has behind its header.

        Raises ValueError for a version that the schemas do not know.
        """
        if not 0 <= version <= APIS[FETCH].max_version:
            raise ValueError(f"no schema for Fetch version {version}")
        self._has_endpoints = version >= APIS[FETCH].first_with_addresses
        program, self._tagged = body_program(version, observer is not None)
        self.remaining_bytes = body_bytes
        self._telling = Telling(observer) if observer is not None else None
        self._stack: list[tuple[tuple[Step, ...], int, int]] = [(program, 0, 1)]
        self._skip = 0
        self._partial = b""

    @property
    def opaque_bytes(self) -> int:
        """How many of the next bytes need not be shown and may be passed over with `skip`."""
        return self._skip

    @property
    def at_tail(self) -> bool:
        """Whether the next byte is the first of the body's own tag section.

        Never so before version 12, which has no tag sections.
        """
        return self._tagged and not self._stack and not self._skip

    @property
    def is_done(self) -> bool:
        """Whether all that is left may pass unread: nothing to be told, nor any address, is in it.

        May be False to the end, as after a last topic without partitions.
        """
        telling = self._telling
        return (
            telling is not None
            and telling.told
            and not self._has_endpoints
            and all(index and times == 1 for _, index, times in self._stack)
        )

    def skip(self, count: int) -> None:
        """Pass over `count` bytes, at most `opaque_bytes`, that were moved unseen."""
        if not 0 <= count <= self._skip:
            raise ValueError(f"cannot skip {count} of {self._skip} bytes")
        self._skip -= count
        self.remaining_bytes -= count
        if not self._stack and not self._skip:
            self._check_end(self.remaining_bytes)

    def feed(self, data: Buffer) -> int:
        """Take the next bytes of the body, in pieces of any size.

        Returns how many were taken: all of them, or those before the tail. Opaque bytes may be
        among them. Raises MalformedResponse, after which the walker is of no more use.
        """
        held = len(self._partial)
        if held:
            data = self._partial + bytes(data)
            self._partial = b""
            self.remaining_bytes += held
        taken = self._run(data, min(len(data), self.remaining_bytes))
        self.remaining_bytes -= taken
        return taken - held

    def _run(self, data: Buffer, end: int) -> int:
        """Follow the program through `data[:end]` and return how many bytes were used or kept."""
        pos = 0
        skip = self._skip
        stack = self._stack
        left = self.remaining_bytes
        telling = self._telling
        while True:
            pos += skip
            if pos > end:
                self._skip = pos - end
                return end
            if not stack:
                self._skip = 0
                self._check_end(left - pos)
                return pos
            program, index, times = stack[-1]
            step = program[index]
            skip = step.skip_bytes
            inner = None
            if not skip:
                found = step.read(telling, data, pos, end, left)
                if found is None:
                    return self._keep(data, pos, end)
                number, pos = found
                inner = step.program
                if number < NULL or (number > left - pos and inner != ()):
                    raise MalformedResponse(f"a length of {number} with {left - pos} bytes left")
                if inner is None:
                    skip = max(number, 0)
            if skip > left - pos:
                raise MalformedResponse(f"a field of {skip} bytes with {left - pos} left")
            if index + 1 < len(program):
                stack[-1] = (program, index + 1, times)
            elif times > 1:
                stack[-1] = (program, 0, times - 1)
            else:
                stack.pop()
            if inner and number > 0:
                stack.append((inner, 0, number))

    def _keep(self, data: Buffer, pos: int, end: int) -> int:
        """Hold the start of a field until the rest comes."""
        if end == self.remaining_bytes:
            raise MalformedResponse("the response ends inside a field")
        self._skip = 0
        self._partial = bytes(data[pos:end])
        return end

    def _check_end(self, left: int) -> None:
        """Check what is left behind the last field: a tag section, or nothing."""
        if self._tagged != (left > 0):
            raise MalformedResponse(f"{left} bytes behind the last field")


def neutral_tail(tail: bytes) -> bytes:
    """Return a Fetch response's own tag section without node endpoints, at the same length.

    The length must not change because the frame's length was sent before. In the place of the
    endpoints comes a field of zeros that clients do not know; they learn the new leader from
    Metadata. A section without endpoints is returned as the same object. Raises MalformedResponse.
    """
    try:
        tags, end = read_tags(tail, 0)
        _, start = read_uvarint(tail, 0)
    except (IndexError, ValueError) as error:
        raise MalformedResponse(f"the last tag section: {error}") from None
    if end != len(tail):
        raise MalformedResponse(f"{len(tail) - end} bytes behind the last tag section")
    if all(tag.number != _NODE_ENDPOINTS_TAG for tag in tags):
        return tail
    kept = [tail[:start]]
    fillers: list[bytes] = []
    for tag in tags:
        if tag.number == _NODE_ENDPOINTS_TAG:
            fillers.append(_filler(tag.end - start))
        else:
            kept.append(tail[start : tag.end])
        start = tag.end
    return b"".join(kept + fillers)  # the numbers of a section go up, so fillers come last


def _filler(size: int) -> bytes:
    """Return a tagged field of exactly `size` bytes."""
    for number in map(write_uvarint, FILLER_TAGS):
        room = size - len(number)
        for size_bytes in range(1, MAX_UVARINT_BYTES + 1):
            value_bytes = room - size_bytes
            if value_bytes < 0:
                break
            prefix = write_uvarint(value_bytes)
            if len(prefix) == size_bytes:
                return number + prefix + bytes(value_bytes)
    raise MalformedResponse(f"node endpoints in {size} bytes")
