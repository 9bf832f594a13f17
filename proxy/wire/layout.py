"""Where each field of a message lies, compiled from kafka-python's schemas.

One field can be read or changed so, and every other byte, tagged fields of the future included,
stays as it came. kafka-python's own decode and encode would lose them: it drops unknown tags and
tagged fields that hold their default.

Positions count from the start of a buffer. What reads or skips takes the position of a value and
returns that behind it; it raises one of INCOMPLETE where the buffer ends first, and ValueError for
bytes that cannot be.
"""

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from proxy.wire.apis import APIS, is_known

Buffer: TypeAlias = bytes | bytearray | memoryview

INCOMPLETE = (IndexError, struct.error)
UNREADABLE = (*INCOMPLETE, ValueError)
"""All that is raised for bytes that do not follow a layout."""

NULL = -1
"""As a length or count."""

MAX_UVARINT_BYTES = 5
"""Kafka's varints hold 32 bits, seven in each byte (KIP-482)."""

_MAX_UVARINT = 2**32 - 1
_MORE = 0x80
_PAYLOAD = 0x7F
_PAYLOAD_BITS = 7

_NULL_STRUCT = 0xFF
_CODES = {1: "b", 2: "h", 4: "i", 8: "q", 16: "16s"}
"""Of `struct`, by the size of a field: integers come out signed, ids as bytes."""


# Numbers and tag sections


def read_uvarint(data: Buffer, pos: int) -> tuple[int, int]:
    """Read a number of at most 32 bits."""
    first = data[pos]
    if first < _MORE:
        return first, pos + 1
    value = 0
    for index in range(MAX_UVARINT_BYTES):
        byte = data[pos + index]
        value |= (byte & _PAYLOAD) << (_PAYLOAD_BITS * index)
        if byte < _MORE:
            if value > _MAX_UVARINT:
                break
            return value, pos + index + 1
    raise ValueError("a varint has more than 32 bits")


def write_uvarint(value: int) -> bytes:
    """Return the shortest form of `value`, 0 to 2^32 - 1."""
    out = bytearray()
    while value >= _MORE:
        out.append((value & _PAYLOAD) | _MORE)
        value >>= _PAYLOAD_BITS
    out.append(value)
    return bytes(out)


class Tag(NamedTuple):
    """One tagged field of a section: its number and where its value lies in the buffer."""

    number: int
    start: int
    end: int


def read_tags(data: Buffer, pos: int) -> tuple[list[Tag], int]:
    """Read the section of tagged fields that ends a record."""
    count, pos = read_uvarint(data, pos)
    tags: list[Tag] = []
    for _ in range(count):
        number, pos = read_uvarint(data, pos)
        size, start = read_uvarint(data, pos)
        pos = start + size
        if pos > len(data):
            raise IndexError("a tagged field runs over the end")
        tags.append(Tag(number, start, pos))
    return tags, pos


def skip_tags(data: Buffer, pos: int) -> int:
    """Skip the section of tagged fields that ends a record."""
    return pos + 1 if data[pos] == 0 else read_tags(data, pos)[1]


def write_tags(fields: list[tuple[int, bytes]]) -> bytes:
    """Return a tag section of these (number, value) pairs, in the order given."""
    parts = [write_uvarint(len(fields))]
    for number, value in fields:
        parts += (write_uvarint(number), write_uvarint(len(value)), value)
    return b"".join(parts)


class Length(NamedTuple):
    """How a length or count is written; NULL is one, too."""

    read: Callable[[Buffer, int], tuple[int, int]]
    write: Callable[[int], bytes]


def _read_compact(data: Buffer, pos: int) -> tuple[int, int]:
    first = data[pos]
    if first < _MORE:
        return first + NULL, pos + 1
    number, pos = read_uvarint(data, pos)
    return number + NULL, pos


def _fixed_length(form: Struct) -> Length:
    unpack, size = form.unpack_from, form.size

    def read(data: Buffer, pos: int) -> tuple[int, int]:
        (number,) = unpack(data, pos)
        if number < NULL:
            raise ValueError(f"a length of {number}")
        return number, pos + size

    return Length(read, form.pack)


COMPACT = Length(_read_compact, lambda number: write_uvarint(number - NULL))
"""A varint of the number + 1, 0 for null."""

_INT16 = _fixed_length(Struct(">h"))
_INT32 = _fixed_length(Struct(">i"))


# Values


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value, or a run of values, of always the same size."""

    form: Struct

    size: int
    """In bytes."""

    def read(self, data: Buffer, pos: int) -> tuple[Any, int]:
        """Read an integer, or an id as bytes."""
        return self.form.unpack_from(data, pos)[0], pos + self.size

    def skip(self, _data: Buffer, pos: int) -> int:
        """Skip it, over the end if need be."""
        return pos + self.size

    def write(self, number: int) -> bytes:
        """Return the wire form of an integer."""
        return self.form.pack(number)


@dataclass(frozen=True, slots=True)
class Sized:
    """A length, then that many bytes."""

    length: Length

    is_text: bool

    def content(self, data: Buffer, pos: int) -> tuple[int, int]:
        """Return where the bytes begin and end; null is as if there were none."""
        size, start = self.length.read(data, pos)
        end = start + size if size > 0 else start
        if end > len(data):
            raise IndexError(f"a length of {size} with {len(data) - start} bytes left")
        return start, end

    def read(self, data: Buffer, pos: int) -> tuple[Any, int]:
        """Read a string, or bytes; null as if it were empty."""
        start, end = self.content(data, pos)
        return (str(data[start:end], "utf-8") if self.is_text else bytes(data[start:end])), end

    def skip(self, data: Buffer, pos: int) -> int:
        """Skip it, over the end if need be."""
        size, pos = self.length.read(data, pos)
        return pos + size if size > 0 else pos

    def write(self, text: str) -> bytes:
        """Return the wire form of a string. Raises ValueError when it is too long for it."""
        encoded = text.encode()
        try:
            return self.length.write(len(encoded)) + encoded
        except struct.error as error:
            raise ValueError(f"a string of {len(encoded)} bytes: {error}") from None


@dataclass(frozen=True, slots=True)
class Array:
    """A count, then that many elements."""

    length: Length
    element: "Node"

    @property
    def record(self) -> "RecordLayout":
        """The layout of the elements. Raises TypeError when they are no records."""
        if isinstance(self.element, RecordLayout):
            return self.element
        raise TypeError(f"not an array of records: {self}")

    def count(self, data: Buffer, pos: int) -> tuple[int, int]:
        """Read how many elements follow; 0 for null."""
        count, pos = self.length.read(data, pos)
        return max(count, 0), pos

    def skip(self, data: Buffer, pos: int) -> int:
        """Skip it, over the end if need be."""
        count, pos = self.length.read(data, pos)
        if count <= 0:
            return pos
        if count > len(data) - pos:  # no element takes less than a byte
            raise IndexError(f"an array of {count} elements in {len(data) - pos} bytes")
        if isinstance(self.element, Fixed):
            return pos + count * self.element.size
        skip = self.element.skip
        for _ in range(count):
            pos = skip(data, pos)
        return pos


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Fields one after another."""

    fields: dict[str, "Node"]
    """Untagged fields by kafka-python's name, in wire order."""

    tags: dict[str, int] | None
    """The numbers of the known tagged fields; None when there is no tag section."""

    program: tuple[Callable[[Buffer, int], int], ...]
    """What skips the record: neighbours of fixed size at once, nested records unfolded."""

    def array(self, field: str) -> Array:
        """Return the layout of an array. Raises TypeError when the field is none."""
        node = self.fields[field]
        if isinstance(node, Array):
            return node
        raise TypeError(f"{field} is not an array")

    def skip(self, data: Buffer, pos: int) -> int:
        """Skip it. Raises IndexError when it runs over the end."""
        for skip in self.program:
            pos = skip(data, pos)
        if pos > len(data):
            raise IndexError("a record runs over the end")
        return pos

    def seek(self, field: str | None, data: Buffer, pos: int) -> int:
        """Return where a field begins in the record at `pos`; None stands for its tag section."""
        for name, node in self.fields.items():
            if name == field:
                return pos
            pos = node.skip(data, pos)
        if field is not None:
            raise KeyError(field)
        return pos

    def spans(self, data: Buffer, pos: int) -> tuple[dict[str, tuple[int, int]], int]:
        """Return where each untagged field begins and ends, and where the record does."""
        found = {}
        for name, node in self.fields.items():
            start, pos = pos, node.skip(data, pos)
            found[name] = start, pos
        if self.tags is not None:
            pos = skip_tags(data, pos)
        if pos > len(data):
            raise IndexError("a record runs over the end")
        return found, pos

    def head(self, *wanted: str) -> Struct:
        """Return how to unpack some of the fields of fixed size with which the record begins.

        The others are passed over; names that are not among them are left out.
        """
        parts = [
            node.form.format[1:] if name in wanted else f"{node.size}x"
            for name, node in self._leading()
        ]
        return Struct(">" + "".join(parts))

    def place(self, field: str) -> int | None:
        """Return where a field begins in every such record; None when it is not in the head."""
        place = 0
        for name, node in self._leading():
            if name == field:
                return place
            place += node.size
        return None

    def _leading(self) -> Iterator[tuple[str, Fixed]]:
        for name, node in self.fields.items():
            if not isinstance(node, Fixed):
                return
            yield name, node


@dataclass(frozen=True, slots=True)
class OptionalRecord:
    """A record behind one byte that says whether it is there."""

    record: RecordLayout

    def skip(self, data: Buffer, pos: int) -> int:
        """Skip it."""
        is_there = data[pos] != _NULL_STRUCT
        return self.record.skip(data, pos + 1) if is_there else pos + 1


Node: TypeAlias = Fixed | Sized | Array | RecordLayout | OptionalRecord


# Messages


@cache
def request_layout(api_key: int, version: int) -> RecordLayout:
    """Return the layout of a request's body. Raises ValueError where there is no schema."""
    return _compile_message("request", api_key, version)


@cache
def response_layout(api_key: int, version: int) -> RecordLayout:
    """Return the layout of a response's body. Raises ValueError where there is no schema."""
    return _compile_message("response", api_key, version)


@cache
def tagged_response_layout(api_key: int, version: int, field: str) -> RecordLayout:
    """Return the layout of the value of one of the response's top-level tagged fields.

    It is a record of that field alone.
    """
    node = _compile(APIS[api_key].response._struct.fields[field], version, flexible=True)
    return RecordLayout({field: node}, None, (node.skip,))


@dataclass(frozen=True, slots=True)
class PartitionFields:
    """Some fields of each partition in a message.

    The message has an array of topics, each of which is a name or id and an array of partitions.
    """

    message: RecordLayout
    field: str
    """Of the array."""

    partition: RecordLayout

    head: Struct
    """Unpacks the fields that are wanted."""

    def read(self, data: Buffer, pos: int) -> Iterator[tuple[Any, int, tuple[Any, ...]]]:
        """Yield the topic, the position and the fields of each partition in a message at `pos`.

        Of a partition that is yielded all bytes are there.
        """
        topics = self.message.array(self.field)
        topic = topics.record
        topic_key, in_topic = topic.fields.values()
        # The schemas say so; the checks are for the types.
        assert isinstance(topic_key, Fixed | Sized)
        assert isinstance(in_topic, Array)
        skip, unpack = self.partition.skip, self.head.unpack_from
        pos = self.message.seek(self.field, data, pos)
        topic_count, pos = topics.count(data, pos)
        for _ in range(topic_count):
            key, pos = topic_key.read(data, pos)
            count, pos = in_topic.count(data, pos)
            for _ in range(count):
                end = skip(data, pos)
                yield key, pos, unpack(data, pos)
                pos = end
            if topic.tags is not None:
                pos = skip_tags(data, pos)


@cache
def partition_fields(
    layout_of: Callable[[int, int], RecordLayout], api_key: int, version: int, *wanted: str
) -> PartitionFields:
    """Return how to read these fields, from the head of each partition.

    Args:
        layout_of: `request_layout` or `response_layout`.
        api_key: of the message.
        version: of the message. ValueError is raised where there is no schema.
        wanted: in wire order; those that the version has not are left out.

    """
    message = layout_of(api_key, version)
    field, topics = next(
        (name, node) for name, node in message.fields.items() if isinstance(node, Array)
    )
    *_, in_topic = topics.record.fields
    partition = topics.record.array(in_topic).record
    return PartitionFields(message, field, partition, partition.head(*wanted))


def _compile_message(kind: str, api_key: int, version: int) -> RecordLayout:
    if not is_known(api_key, version):
        raise ValueError(f"no schema for API {api_key} version {version}")
    message = getattr(APIS[api_key], kind)
    return _compile_record(message._struct, version, flexible=message.flexible_version_q(version))


def _compile_record(schema: Any, version: int, *, flexible: bool) -> RecordLayout:
    fields = {
        field.name: _compile(field, version, flexible=flexible)
        for field in schema.untagged_fields(version)
    }
    program: list[Callable[[Buffer, int], int]] = []
    run = 0
    for node in fields.values():
        if isinstance(node, Fixed):
            run += node.size
            continue
        program += _skip_run(run)
        run = 0
        program += node.program if isinstance(node, RecordLayout) else (node.skip,)
    if not flexible:
        program += _skip_run(run)
    tags = None
    if flexible:
        program.append(_skip_run_and_tags(run))
        known = (field for field in schema.fields.values() if field.tagged_field_q(version))
        tags = {field.name: field.tag for field in known}
    return RecordLayout(fields, tags, tuple(program))


def _skip_run(size: int) -> list[Callable[[Buffer, int], int]]:
    return [lambda _data, pos: pos + size] if size else []


def _skip_run_and_tags(size: int) -> Callable[[Buffer, int], int]:
    def skip(data: Buffer, pos: int) -> int:
        pos += size
        return pos + 1 if data[pos] == 0 else read_tags(data, pos)[1]

    return skip


def _compile(field: Any, version: int, *, flexible: bool) -> Node:
    if field.is_array():
        if field.is_struct_array():
            element: Node = _compile_record(field.array_of, version, flexible=flexible)
        else:
            element = _compile(field.array_of, version, flexible=flexible)
        return Array(COMPACT if flexible else _INT32, element)
    if field.is_struct():
        record = _compile_record(field, version, flexible=flexible)
        return OptionalRecord(record) if field.nullable_for_version_q(version) else record
    if field.type_str in ("bytes", "records"):
        return Sized(COMPACT if flexible else _INT32, is_text=False)
    if field.type_str == "string":
        return Sized(COMPACT if flexible else _INT16, is_text=True)
    size = field._type.size
    return Fixed(Struct(">" + _CODES[size]), size)
