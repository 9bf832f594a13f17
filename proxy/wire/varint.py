"""Unsigned variable-length integers and the tag sections made of them (KIP-482)."""

from typing import NamedTuple, TypeAlias

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
