"""Where a run of record batches ends, read from their headers alone."""

from struct import Struct

from proxy.wire.varint import Buffer

_HEADER = Struct(">qi4xb")
"""Offset, length, magic: at the same places in every format."""

_OVERHEAD_BYTES = 12
"""Offset and length, which the length does not count."""

_BATCH_MAGIC = 2
_MIN_BATCH_BYTES = 61
_MIN_MESSAGE_BYTES = 26
"""Whole, overhead included. Older message sets have magic 0 or 1."""

_LAST_OFFSET_DELTA = Struct(">i")
_LAST_OFFSET_DELTA_AT = 23

_MAX_OFFSET = 2**63 - 1


def end_of_batches(data: Buffer, start: int, end: int) -> int | None:
    """Return the offset behind the last whole record batch in `data[start:end]`.

    Brokers cut off the last batch where the client's limit is: it does not count. Batches of
    control records count. None when there is no whole batch, and when the bytes are not record
    batches one after another. In message sets (magic 0 and 1) a message is taken for a batch; the
    offset of a compressed one is that of the last message in it.
    """
    found = None
    low = 0
    last_header = end - _HEADER.size
    while start <= last_header:
        offset, length, magic = _HEADER.unpack_from(data, start)
        after = start + _OVERHEAD_BYTES + length
        least = _MIN_BATCH_BYTES if magic == _BATCH_MAGIC else _MIN_MESSAGE_BYTES
        if not 0 <= magic <= _BATCH_MAGIC or after - start < least or offset < low:
            return None
        if after > end:
            break
        delta = 0
        if magic == _BATCH_MAGIC:
            (delta,) = _LAST_OFFSET_DELTA.unpack_from(data, start + _LAST_OFFSET_DELTA_AT)
            if delta < 0:
                return None
        found = low = offset + delta + 1
        if found > _MAX_OFFSET:
            return None
        start = after
    return found
