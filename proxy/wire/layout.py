"""Message layouts as small trees, compiled from kafka-python's schemas.

The tree says where each field of a message lies, so that one field can be read or changed and every
other byte, tagged fields of the future included, stays as it came. kafka-python's own decode and
encode would lose them: it drops unknown tags and tagged fields that hold their default.
"""

import struct
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

from proxy.wire.apis import APIS
from proxy.wire.malformed import MalformedResponse

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_UVARINT_BYTES = 5
"""Kafka's varints hold 32 bits, seven in each byte."""

MAX_UVARINT = 2**32 - 1

_MORE = 0x80
_PAYLOAD = 0x7F
_PAYLOAD_BITS = 7


class Tag(NamedTuple):
    """One tagged field of a section: its number and where its value lies in the buffer."""

    number: int
    start: int
    end: int


def read_uvarint(data: Buffer, pos: int) -> tuple[int, int]:
    """Return the number at `pos` and the position behind it.

    Raises IndexError when the buffer ends inside the number, ValueError when it has more than 32
    bits.
    """
    first = data[pos]
    if first < _MORE:
        return first, pos + 1
    value = 0
    for index in range(MAX_UVARINT_BYTES):
        byte = data[pos + index]
        value |= (byte & _PAYLOAD) << (_PAYLOAD_BITS * index)
        if byte < _MORE:
            if value > MAX_UVARINT:
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


def read_tags(data: Buffer, pos: int) -> tuple[list[Tag], int]:
    """Return the tagged fields of the section at `pos` and the position behind the section.

    Raises IndexError when the buffer ends first, ValueError for a varint that is too long.
    """
    count, pos = read_uvarint(data, pos)
    tags: list[Tag] = []
    for _ in range(count):
        number, pos = read_uvarint(data, pos)
        size, pos = read_uvarint(data, pos)
        if pos + size > len(data):
            raise IndexError("a tagged field runs over the end")
        tags.append(Tag(number, pos, pos + size))
        pos += size
    return tags, pos


def write_tags(fields: list[tuple[int, bytes]]) -> bytes:
    """Return a tag section of these (number, value) pairs, in the order given."""
    parts = [write_uvarint(len(fields))]
    for number, value in fields:
        parts += (write_uvarint(number), write_uvarint(len(value)), value)
    return b"".join(parts)


_INT16 = Struct(">h")
_INT32 = Struct(">i")

_NULL = -1
_NULL_STRUCT = 0xFF


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value, or a run of values, of always the same size."""

    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Sized:
    """A length, then that many bytes."""

    length: Struct | None
    """Form of the length, -1 for null. None: a varint of length + 1, 0 for null."""

    is_bytes: bool
    """Bytes or records, whose content is of no interest here; else a string."""


@dataclass(frozen=True, slots=True)
class Array:
    """A count, then that many elements."""

    compact: bool
    """The count is a varint of count + 1, 0 for null; else an int32, -1 for null."""

    element: "Node"


@dataclass(frozen=True, slots=True)
class Record:
    """Fields one after another."""

    fields: dict[str, "Node"]
    """Untagged fields by kafka-python's name, in wire order."""

    program: tuple["Node", ...]
    """The same for skipping: neighbours of fixed size merged, nested records unfolded."""

    tags: dict[str, int] | None
    """The numbers of the known tagged fields; None when there is no tag section."""


@dataclass(frozen=True, slots=True)
class Optional:
    """A record behind one byte that says whether it is there."""

    record: Record


@dataclass(frozen=True, slots=True)
class TagSection:
    """A count, then that many of (number, size, value), all varints but the value."""


Node: TypeAlias = Fixed | Sized | Array | Record | Optional | TagSection


def record_of(array: Node) -> Record:
    """Return the layout of an array's elements. Raises TypeError when they are no records."""
    if isinstance(array, Array) and isinstance(array.element, Record):
        return array.element
    raise TypeError(f"not an array of records: {array}")


@cache
def request_layout(api_key: int, version: int) -> Record:
    """Return the layout of a request's body. Raises KeyError for an unknown API."""
    return _compile_message(APIS[api_key].request, version)


@cache
def response_layout(api_key: int, version: int) -> Record:
    """Return the layout of a response's body. Raises KeyError for an unknown API."""
    return _compile_message(APIS[api_key].response, version)


@cache
def tagged_response_layout(api_key: int, version: int, field: str) -> Node:
    """Return the layout of the value of one of the response's top-level tagged fields."""
    fields = APIS[api_key].response._struct.fields
    return _compile(fields[field], version, flexible=True)


def _compile_message(message: Any, version: int) -> Record:
    return _compile_record(message._struct, version, flexible=message.flexible_version_q(version))


def _compile_record(schema: Any, version: int, *, flexible: bool) -> Record:
    fields = {
        field.name: _compile(field, version, flexible=flexible)
        for field in schema.untagged_fields(version)
    }
    program: list[Node] = []
    for node in fields.values():
        for step in node.program if isinstance(node, Record) else (node,):
            last = program[-1] if program else None
            if isinstance(step, Fixed) and isinstance(last, Fixed):
                program[-1] = Fixed(last.size + step.size)
            else:
                program.append(step)
    tags = None
    if flexible:
        program.append(TagSection())
        known = (field for field in schema.fields.values() if field.tagged_field_q(version))
        tags = {field.name: field.tag for field in known}
    return Record(fields, tuple(program), tags)


def _compile(field: Any, version: int, *, flexible: bool) -> Node:
    if field.is_array():
        if field.is_struct_array():
            element: Node = _compile_record(field.array_of, version, flexible=flexible)
        else:
            element = _compile(field.array_of, version, flexible=flexible)
        return Array(flexible, element)
    if field.is_struct():
        record = _compile_record(field, version, flexible=flexible)
        return Optional(record) if field.nullable_for_version_q(version) else record
    if field.type_str in ("bytes", "records"):
        return Sized(None if flexible else _INT32, is_bytes=True)
    if field.type_str == "string":
        return Sized(None if flexible else _INT16, is_bytes=False)
    return Fixed(field._type.size)


class Cursor:
    """A place in a whole message. Each step is checked against the message's end.

    Steps raise MalformedResponse when the bytes do not follow the layout.
    """

    __slots__ = ("data", "pos")

    def __init__(self, data: Buffer, pos: int) -> None:
        self.data = data
        self.pos = pos

    def skip(self, node: Node) -> tuple[int, int]:
        """Move behind a value and return where it starts and ends."""
        start = self.pos
        try:
            self._skip(node)
        except (IndexError, ValueError, struct.error) as error:
            raise MalformedResponse(f"at byte {self.pos}: {error}") from None
        if self.pos > len(self.data):
            raise MalformedResponse(f"a field at byte {start} runs over the end")
        return start, self.pos

    def seek(self, record: Record, field: str) -> None:
        """Move from the start of `record` to the start of one of its fields."""
        for name, node in record.fields.items():
            if name == field:
                return
            self.skip(node)
        raise KeyError(field)

    def enter(self, array: Array) -> int:
        """Move behind an array's count and return it; 0 for null."""
        try:
            return max(self._count(array), 0)
        except (IndexError, ValueError, struct.error) as error:
            raise MalformedResponse(f"at byte {self.pos}: {error}") from None

    def spans(self, record: Record) -> dict[str, tuple[int, int]]:
        """Move behind a record and return where each of its untagged fields starts and ends."""
        found = {name: self.skip(node) for name, node in record.fields.items()}
        if record.tags is not None:
            self.skip(TagSection())
        return found

    def _count(self, array: Array) -> int:
        if array.compact:
            count, self.pos = read_uvarint(self.data, self.pos)
            return count - 1
        (count,) = _INT32.unpack_from(self.data, self.pos)
        self.pos += _INT32.size
        if count < _NULL:
            raise ValueError(f"an array of {count} elements")
        return int(count)

    def _skip(self, node: Node) -> None:
        match node:
            case Fixed(size):
                self.pos += size
            case Sized():
                self._skip_sized(node)
            case Array(_, element):
                self._skip_elements(self._count(node), element)
            case TagSection():
                self.pos = read_tags(self.data, self.pos)[1]
            case Record(_, program):
                for step in program:
                    self._skip(step)
            case Optional(record):
                mark = self.data[self.pos]
                self.pos += 1
                if mark != _NULL_STRUCT:
                    self._skip(record)

    def _skip_elements(self, count: int, element: Node) -> None:
        if count > len(self.data) - self.pos:  # no element takes less than a byte
            raise ValueError(f"an array of {count} elements in {len(self.data) - self.pos} bytes")
        if isinstance(element, Fixed):
            self.pos += max(count, 0) * element.size
            return
        for _ in range(count):
            self._skip(element)

    def _skip_sized(self, node: Sized) -> None:
        if node.length is None:
            length, self.pos = read_uvarint(self.data, self.pos)
            length -= 1
        else:
            (length,) = node.length.unpack_from(self.data, self.pos)
            self.pos += node.length.size
            if length < _NULL:
                raise ValueError(f"a length of {length}")
        if length > 0:
            self.pos += length


def content_start(node: Sized, data: Buffer, start: int) -> int:
    """Return where the content of the value at `start` begins: behind its length."""
    return read_uvarint(data, start)[1] if node.length is None else start + node.length.size


def read_string(node: Sized, data: Buffer, span: tuple[int, int]) -> str:
    """Return the string that lies at `span`; null reads as the empty string.

    Raises MalformedResponse when it is not UTF-8.
    """
    start, end = span
    try:
        return str(data[content_start(node, data, start) : end], "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedResponse(f"a name is not UTF-8: {error}") from None


def write_string(node: Sized, text: str) -> bytes:
    """Return the wire form of a string. Raises ValueError when it is too long for it."""
    encoded = text.encode()
    try:
        prefix = (
            write_uvarint(len(encoded) + 1)
            if node.length is None
            else node.length.pack(len(encoded))
        )
    except struct.error as error:
        raise ValueError(f"a string of {len(encoded)} bytes: {error}") from None
    return prefix + encoded


def write_count(array: Array, count: int) -> bytes:
    """Return the wire form of an array's count."""
    return write_uvarint(count + 1) if array.compact else _INT32.pack(count)
