"""The steps through a Fetch response's body, compiled from the schemas."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, Protocol, TypeAlias

from proxy.wire.apis import FETCH
from proxy.wire.batches import end_of_batches
from proxy.wire.errors import MalformedResponse
from proxy.wire.fetch import (
    NO_OFFSET,
    FetchedPartition,
    TopicKey,
    leading_fields,
    packing,
)
from proxy.wire.layout import Array, Fixed, Node, Record, Sized, TagSection, response_layout
from proxy.wire.varint import Buffer, read_uvarint

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
