"""Where each field of a message lies, compiled from kafka-python's schemas.

One field can be read or changed so, and every other byte stays as it came. kafka-python's own
decode and encode would drop unknown tagged fields, and those that hold their default.

Positions count from the start of a buffer. What reads returns a value and the position behind it,
what skips that position, which may lie behind the end. Both raise one of INCOMPLETE where the
buffer ends first, and ValueError for bytes that cannot be.
"""

import struct
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, repeat, takewhile
from struct import Struct
from typing import Any, NamedTuple, TypeAlias, TypeVar

from proxy.wire.apis import APIS, is_known, message_schema

Buffer: TypeAlias = bytes | bytearray | memoryview
Skip: TypeAlias = Callable[[Buffer, int], int]
PartitionRow: TypeAlias = tuple[Any, int, tuple[Any, ...]]
"""A topic's name or id; a partition's position and some of its fields."""

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
"""Work that is done a step at a time, each of which takes less than a millisecond, and its result.
A message may have a million elements."""


def run_generator(steps: Generator[object, None, _T]) -> _T:
    """Take all steps at once; return what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: _T = done.value
            return result


STEP_ELEMENTS, _STEP_GROUPS = 64, 8
"""So many elements of an array are edited in one step, and so many, with theirs, are skipped."""

_STEP_BYTES = 8 << 10
"""What is no longer is skipped at once, which takes half a millisecond at most."""

INCOMPLETE = (IndexError, struct.error)
UNREADABLE = (*INCOMPLETE, ValueError)
"""All that is raised for bytes that do not follow a layout."""

NULL = -1
"""As a length or count."""
MAX_UVARINT_BYTES = 5
"""Kafka's varints hold 32 bits, seven in each byte (KIP-482)."""
MAX_TAGS = 64
"""Tagged fields of one record. Kafka's own records have less than ten; each takes a microsecond."""
MAX_ELEMENTS = 10_000
"""Topics, partitions and tagged fields of a request that are read at once, in some 10 ms."""
LEAST_TAG_BYTES = 2
"""Of a tagged field: its number and length."""
MAX_TOPIC_BYTES = 249
"""Of a topic's name: brokers have no longer ones."""
_ANY_COUNT = 2**31 - 1
_MAX_UVARINT = 2**32 - 1
VARINT_MORE, VARINT_PAYLOAD, VARINT_PAYLOAD_BITS = 0x80, 0x7F, 7
_NULL_STRUCT = 0xFF
_CODES = {1: "b", 2: "h", 4: "i", 8: "q", 16: "16s"}
"""Of `struct`, by the size of a field: integers come out signed, ids as bytes."""


class TooManyElements(ValueError):  # noqa: N818 - named for what was found
    """A request has more than MAX_ELEMENTS: what it names is left to the broker."""


def read_uvarint(data: Buffer, pos: int) -> tuple[int, int]:
    """Read a number of at most 32 bits."""
    first = data[pos]
    if first < VARINT_MORE:
        return first, pos + 1
    value, bits = first & VARINT_PAYLOAD, VARINT_PAYLOAD_BITS
    for place in range(pos + 1, pos + MAX_UVARINT_BYTES):
        byte = data[place]
        value |= (byte & VARINT_PAYLOAD) << bits
        if byte < VARINT_MORE:
            if value > _MAX_UVARINT:
                break
            return value, place + 1
        bits += VARINT_PAYLOAD_BITS
    raise ValueError("a varint has more than 32 bits")


def encode_uvarint(value: int) -> bytes:
    """Return the shortest form of `value`, 0 to 2^32 - 1."""
    out = bytearray()
    while value >= VARINT_MORE:
        out.append((value & VARINT_PAYLOAD) | VARINT_MORE)
        value >>= VARINT_PAYLOAD_BITS
    out.append(value)
    return bytes(out)


class TaggedFieldSpan(NamedTuple):
    """A tagged field: its number and where its value lies in the buffer."""

    number: int
    start: int
    end: int


def read_tags(data: Buffer, pos: int) -> tuple[list[TaggedFieldSpan], int]:
    """Read the section of tagged fields that ends a record."""
    count, pos = read_uvarint(data, pos)
    if count > MAX_TAGS:
        raise ValueError(f"{count} tagged fields, more than {MAX_TAGS}")
    tags = []
    for _ in range(count):
        number, pos = read_uvarint(data, pos)
        size, start = read_uvarint(data, pos)
        pos = start + size
        if pos > len(data):
            raise IndexError("a tagged field runs over the end")
        tags.append(TaggedFieldSpan(number, start, pos))
    return tags, pos


def skip_tags(data: Buffer, pos: int) -> int:
    """Skip the section of tagged fields that ends a record."""
    return pos + 1 if data[pos] == 0 else read_tags(data, pos)[1]


def write_tags(fields: list[tuple[int, bytes]]) -> bytes:
    """Return a tag section of these (number, value) pairs, in the order given."""
    parts = [encode_uvarint(len(fields))]
    for number, value in fields:
        parts += (encode_uvarint(number), encode_uvarint(len(value)), value)
    return b"".join(parts)


class LengthCodec(NamedTuple):
    """How a length or count is read and written; NULL is one, too."""

    read: Callable[[Buffer, int], tuple[int, int]]
    write: Callable[[int], bytes]


def _read_compact(data: Buffer, pos: int) -> tuple[int, int]:
    first = data[pos]
    if first < VARINT_MORE:
        return first + NULL, pos + 1
    number, pos = read_uvarint(data, pos)
    return number + NULL, pos


def _fixed_length(form: Struct) -> LengthCodec:
    unpack, size = form.unpack_from, form.size

    def read(data: Buffer, pos: int) -> tuple[int, int]:
        (number,) = unpack(data, pos)
        if number < NULL:
            raise ValueError(f"a length of {number}")
        return number, pos + size

    return LengthCodec(read, form.pack)


_COMPACT = LengthCodec(_read_compact, lambda number: encode_uvarint(number - NULL))
"""A varint of the number + 1, 0 for null."""
_INT16 = _fixed_length(Struct(">h"))
_INT32 = _fixed_length(Struct(">i"))


@dataclass(frozen=True, slots=True)
class _Fixed:
    """An integer, or an id of 16 bytes."""

    form: Struct

    def read(self, data: Buffer, pos: int) -> tuple[Any, int]:
        return self.form.unpack_from(data, pos)[0], pos + self.form.size

    def skip(self, _data: Buffer, pos: int) -> int:
        return pos + self.form.size

    def write(self, number: int) -> bytes:
        return self.form.pack(number)


@dataclass(frozen=True, slots=True)
class _Sized:
    """A string or bytes: a length, then so many bytes. Null reads as empty."""

    length: LengthCodec
    is_text: bool

    def content(self, data: Buffer, pos: int) -> tuple[int, int]:
        """Return where the bytes begin and end."""
        size, start = self.length.read(data, pos)
        end = start + size if size > 0 else start
        if end > len(data):
            raise IndexError(f"a length of {size} with {len(data) - start} bytes left")
        return start, end

    def read(self, data: Buffer, pos: int) -> tuple[Any, int]:
        start, end = self.content(data, pos)
        return (str(data[start:end], "utf-8") if self.is_text else bytes(data[start:end])), end

    def skip(self, data: Buffer, pos: int) -> int:
        size, pos = self.length.read(data, pos)
        return pos + size if size > 0 else pos

    def write(self, text: str) -> bytes:
        """Return the wire form of a string. Raises struct.error when it is too long for it."""
        encoded = text.encode()
        return self.length.write(len(encoded)) + encoded


@dataclass(frozen=True, slots=True)
class _Array:
    """A count, then so many elements. Null reads as none."""

    length: LengthCodec
    element: Any

    def count(self, data: Buffer, pos: int) -> tuple[int, int]:
        count, pos = self.length.read(data, pos)
        return max(count, 0), pos

    def skip(self, data: Buffer, pos: int) -> int:
        count, pos = self.count(data, pos)
        if count > len(data) - pos:  # no element takes less than a byte
            raise IndexError(f"an array of {count} elements in {len(data) - pos} bytes")
        if isinstance(self.element, _Fixed):
            return pos + count * self.element.form.size
        skip = self.element.skip
        for _ in range(count):
            pos = skip(data, pos)
        return pos


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Fields one after another."""

    fields: dict[str, Any]
    """Layouts of the untagged fields by kafka-python's name, in wire order."""
    tags: dict[str, int] | None
    """The numbers of the known tagged fields; None when there is no tag section."""
    program: tuple[Skip, ...]
    """What skips the record: neighbours of fixed size at once, nested records unfolded."""

    def skip(self, data: Buffer, pos: int) -> int:
        """Skip the record. Raises IndexError when it runs over the end."""
        for skip in self.program:
            pos = skip(data, pos)
        if pos > len(data):
            raise IndexError("a record runs over the end")
        return pos

    def seek(self, field: str | None, data: Buffer, pos: int) -> int:
        """Return where a field begins in the record at `pos`; None stands for its tag section.

        Fields in front that have fixed sizes need no data. Raises KeyError where it has no such.
        """
        for name, node in self.fields.items():
            if name == field:
                return pos
            pos = node.skip(data, pos)
        if field is not None:
            raise KeyError(field)
        return pos

    def spans(self, data: Buffer, pos: int) -> Steps[tuple[dict[str, tuple[int, int]], int]]:
        """Return where each untagged field begins and ends, and where the record does; in steps."""
        found = {}
        for name, node in self.fields.items():
            start, is_array = pos, isinstance(node, _Array)
            pos = (yield from skip_in_steps(node, data, pos)) if is_array else node.skip(data, pos)
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
        codes = ">"
        for name, node in self.fields.items():
            if not isinstance(node, _Fixed):
                break
            codes += node.form.format[1:] if name in wanted else f"{node.form.size}x"
        return Struct(codes)


@dataclass(frozen=True, slots=True)
class _OptionalRecord:
    """A record behind one byte that says whether it is there."""

    record: RecordLayout

    def skip(self, data: Buffer, pos: int) -> int:
        return pos + 1 if data[pos] == _NULL_STRUCT else self.record.skip(data, pos + 1)


def seek_in_steps(layout: RecordLayout, field: str | None, data: Buffer, pos: int) -> Steps[int]:
    """Return what `seek` does, in steps; the end of the record where it has no such field."""
    for name, node in layout.fields.items():
        if name == field:
            break
        is_array = isinstance(node, _Array)
        pos = (yield from skip_in_steps(node, data, pos)) if is_array else node.skip(data, pos)
    return pos


def skip_in_steps(node: _Array, data: Buffer, pos: int) -> Steps[int]:
    """Skip an array, a few elements at a time, and so the arrays in these."""
    if len(data) - pos <= _STEP_BYTES or isinstance(node.element, _Fixed):
        return node.skip(data, pos)
    count, pos = node.count(data, pos)
    element = node.element
    for number in range(1, count + 1):
        if isinstance(element, RecordLayout):
            pos = (yield from element.spans(data, pos))[1]
        else:
            pos = element.skip(data, pos)
        if not number % _STEP_GROUPS:
            yield
    return pos


@cache
def _message_layout(kind: str, api_key: int, version: int) -> RecordLayout:
    if not is_known(api_key, version):
        raise ValueError(f"no schema for API {api_key} version {version}")
    message = getattr(APIS[api_key], kind)
    is_flexible = message.flexible_version_q(version)
    return _compile_record(message_schema(message), version, flexible=is_flexible)


request_layout = partial(_message_layout, "request")
"""Returns the layout of a request's body. Raises ValueError where there is no schema."""
response_layout = partial(_message_layout, "response")
"""Returns the layout of a response's body. Raises ValueError where there is no schema."""


@cache
def tagged_field_layout(api_key: int, version: int, field: str) -> RecordLayout:
    """Return the layout of a top-level tagged field's value: a record of the field alone."""
    node = _compile(message_schema(APIS[api_key].response).fields[field], version, flexible=True)
    return RecordLayout({field: node}, None, (node.skip,))


class PartitionFieldReader:
    """Reads some fields of each partition in a message.

    The message has an array of topics, each of which is a name or id and an array of partitions.
    `array` is its field, if not the first array in the message. `wanted` are of the fields with
    which a partition begins, in wire order; those that the version has not are left out.
    """

    def __init__(
        self,
        message: RecordLayout,
        array: str | None,
        wanted: tuple[str, ...],
        most: int = _ANY_COUNT,
    ) -> None:
        arrays = (name for name, node in message.fields.items() if isinstance(node, _Array))
        array = array or next(arrays)
        self._most = most
        """So many elements are read; a tagged field counts for each LEAST_TAG_BYTES that it has."""
        before = takewhile(lambda name: name != array, message.fields)
        self._before = _program(message.fields[name] for name in before)
        topics: _Array = message.fields[array]
        self.read_count = topics.length.read
        self.is_tagged = message.tags is not None
        key, in_topic = topics.element.fields.values()
        self.read_key = _reading_name(key) if isinstance(key, _Sized) else key.read
        """Reads a topic's name or id. One that no topic can have reads as empty: it is not kept."""
        self.partition: Any = in_topic.element
        """The layout of a partition; that of a number in an array of those."""
        is_record = isinstance(self.partition, RecordLayout)
        self.head: Struct = self.partition.head(*wanted) if is_record else self.partition.form
        """Unpacks the fields that are wanted."""
        fields = self.partition.fields.values() if is_record else ()
        self._has_rows = all(isinstance(node, _Fixed) for node in fields)
        """Whether all partitions without tagged fields have the same size."""
        self._has_tagged_rows = is_record and self.is_tagged
        self._row = Struct(self.head.format + "x" * self._has_tagged_rows)

    def read(self, data: Buffer, pos: int) -> list[PartitionRow]:
        """Return all partitions of the message that begins at `pos`."""
        found: list[PartitionRow] = []
        self.read_array(data, self.seek(data, pos), found)
        return found

    def seek(self, data: Buffer, pos: int) -> int:
        """Return where the array begins in the message at `pos`."""
        for skip in self._before:
            pos = skip(data, pos)
        return pos

    def read_array(self, data: Buffer, pos: int, found: list[PartitionRow]) -> int:
        """Add each partition in the array at `pos` to those found; return what is behind.

        Raises TooManyElements for a request that has more.
        """
        read_count, read_key, size = self.read_count, self.read_key, self._row.size
        left = self._most
        topics, pos = read_count(data, pos)
        for _ in range(topics):
            key, pos = read_key(data, pos)
            count, pos = read_count(data, pos)
            left -= 1 + count if count > 0 else 1
            if left < 0:
                raise TooManyElements
            end = pos + count * size
            if (  # all are there and have the same size
                self._has_rows
                and pos < end <= len(data)
                and not (self._has_tagged_rows and any(data[pos + size - 1 : end : size]))
            ):
                if count == 1:  # most often, in a fetch session
                    found.append((key, pos, self._row.unpack_from(data, pos)))
                else:
                    rows = self._row.iter_unpack(data[pos:end])
                    found += zip(repeat(key), range(pos, end, size), rows)
                pos = end
            else:
                for _ in range(count):
                    end = self.partition.skip(data, pos)
                    found.append((key, pos, self.head.unpack_from(data, pos)))
                    left -= (end - pos - size) // LEAST_TAG_BYTES
                    if left < 0:
                        raise TooManyElements
                    pos = end
            if self.is_tagged:
                start, pos = pos, skip_tags(data, pos)
                left -= (pos - start) // LEAST_TAG_BYTES
        return pos


def _reading_name(node: _Sized) -> Callable[[Buffer, int], tuple[str, int]]:
    def read(data: Buffer, pos: int) -> tuple[str, int]:
        start, end = node.content(data, pos)
        return (str(data[start:end], "utf-8") if end - start <= MAX_TOPIC_BYTES else ""), end

    return read


@cache
def request_partition_reader(
    api_key: int, version: int, *wanted: str, array: str | None = None
) -> PartitionFieldReader:
    """Return how to read the partitions of a request. Raises as `request_layout` does."""
    return PartitionFieldReader(request_layout(api_key, version), array, wanted, MAX_ELEMENTS)


@cache
def response_partition_reader(api_key: int, version: int, *wanted: str) -> PartitionFieldReader:
    """Return how to read the partitions of a response. Raises as `response_layout` does."""
    return PartitionFieldReader(response_layout(api_key, version), None, wanted)


def _compile_record(schema: Any, version: int, *, flexible: bool) -> RecordLayout:
    fields = {
        field.name: _compile(field, version, flexible=flexible)
        for field in schema.untagged_fields(version)
    }
    program = _program(fields.values())
    tags = {f.name: f.tag for f in schema.fields.values() if f.tagged_field_q(version)}
    if flexible:
        return RecordLayout(fields, tags, (*program, skip_tags))
    return RecordLayout(fields, None, program)


def _program(fields: Iterable[Any]) -> tuple[Skip, ...]:
    """Return what skips fields one after another."""
    program: list[Skip] = []
    for is_fixed, nodes in groupby(fields, key=lambda node: isinstance(node, _Fixed)):
        if is_fixed:
            size = sum(node.form.size for node in nodes)
            program.append(_Fixed(Struct(f"{size}x")).skip)
        else:
            for node in nodes:
                program += node.program if isinstance(node, RecordLayout) else (node.skip,)
    return tuple(program)


def _compile(field: Any, version: int, *, flexible: bool) -> Any:
    if field.is_array():
        of = _compile_record if field.is_struct_array() else _compile
        element = of(field.array_of, version, flexible=flexible)
        return _Array(_COMPACT if flexible else _INT32, element)
    if field.is_struct():
        record = _compile_record(field, version, flexible=flexible)
        return _OptionalRecord(record) if field.nullable_for_version_q(version) else record
    if field.type_str in ("bytes", "records"):
        return _Sized(_COMPACT if flexible else _INT32, is_text=False)
    if field.type_str == "string":
        return _Sized(_COMPACT if flexible else _INT16, is_text=True)
    return _Fixed(Struct(">" + _CODES[field._type.size]))  # noqa: SLF001 - it has no public name
