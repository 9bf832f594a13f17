"""Reads those partitions of a Fetch response that are like most of them, many at once.

Such a partition has no aborted transactions, less than 2 MiB of records, and no tagged fields. From
version 12 on all in front of its records has the same size, then, but for their length. The others,
and those of older versions, are left to the walk from field to field.
"""

from collections.abc import Callable
from struct import Struct
from typing import TypeAlias

from proxy.wire.fetch import FetchedPartition
from proxy.wire.layout import VARINT_MORE, VARINT_PAYLOAD, VARINT_PAYLOAD_BITS, Buffer
from proxy.wire.produce import (
    BATCH_MAGIC,
    BATCH_PREFIX_BYTES,
    MAX_LOG_OFFSET,
    MIN_BATCH_BYTES,
    end_of_batches,
)

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

_BATCH_HEADER = Struct(">qi4xb6xi")  # offset, length, magic, last offset delta


def usual_rows(head: Struct, replica_bytes: int) -> ReadRows:
    """Return how to read them in a version that begins partitions so, up to aborted transactions.

    `head` has all fields; `replica_bytes` are behind the aborted transactions.
    """
    form = Struct(f"{head.format}B{replica_bytes}xB{_LENGTH_BYTES_BEHIND}B")
    unpack, form_bytes = form.unpack_from, form.size
    least_bytes = form_bytes - _LENGTH_BYTES_BEHIND
    unpack_batch = _BATCH_HEADER.unpack_from

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
                    else:
                        last_end = end_of_batches(data, at, after)
                else:
                    last_end = end_of_batches(data, at, after)
            rows.append((index, error, high, stable, start, size, last_end))
            pos = after
            if pos >= end or data[pos]:
                return found + 1, pos
            at = pos + 1
        return most, pos

    return read_rows
