"""Unpack what others have packed, who may have packed more than our memory has room for."""

import zlib

GZIP_WBITS = 16 + zlib.MAX_WBITS


def unpack_at_most(packed: bytes, most_bytes: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Return what zlib has packed, or with GZIP_WBITS gzip; `most_bytes` at most.

    Raises ValueError where it is more, cut off, followed by more, or not packed so.
    """
    unpacking = zlib.decompressobj(wbits)
    try:
        data = unpacking.decompress(packed, most_bytes)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError(f"cut off, or too long: at most {most_bytes} bytes are unpacked")
    return data
