"""Fetch of version 2, the last one without a limit for the whole response.

kafka-python has no schema for it, so its few fields are laid out here.
"""

import struct

VERSION = 2
_HEADER = struct.Struct(">ihhih")
_ASK = struct.Struct(">iii")
_COUNT = struct.Struct(">i")
_NAME_LENGTH = struct.Struct(">h")
_PARTITION = struct.Struct(">iiqi")
_THROTTLE = struct.Struct(">ii")
_ANSWERED_PARTITION = struct.Struct(">iihqi")
_LENGTH_BYTES = 4
_API_KEY = 1
_CONSUMER = -1
_MAX_WAIT_MS = 500
_MIN_BYTES = 1


def request(client_id: str, topic: str, max_bytes: int) -> bytearray:
    """Frame of a request for one partition, correlation id 0."""
    client, name = client_id.encode(), topic.encode()
    frame = bytearray(_HEADER.pack(0, _API_KEY, VERSION, 0, len(client)) + client)
    frame += _ASK.pack(_CONSUMER, _MAX_WAIT_MS, _MIN_BYTES) + _COUNT.pack(1)
    frame += _NAME_LENGTH.pack(len(name)) + name + _PARTITION.pack(1, 0, 0, max_bytes)
    frame[:_LENGTH_BYTES] = (len(frame) - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "big")
    return frame


def read_request(frame: bytes) -> tuple[str, int]:
    """Return the topic and the limit of a request as `request` makes it."""
    *_, client_bytes = _HEADER.unpack_from(frame)
    start = _HEADER.size + client_bytes + _ASK.size + _COUNT.size
    (name_bytes,) = _NAME_LENGTH.unpack_from(frame, start)
    start += _NAME_LENGTH.size
    *_, max_bytes = _PARTITION.unpack_from(frame, start + name_bytes)
    return frame[start : start + name_bytes].decode(), max_bytes


def response_head(topic: str, records_bytes: int) -> bytes:
    """Return what stands between the correlation id and the records, which end the response."""
    name = topic.encode()
    return (
        _THROTTLE.pack(0, 1)
        + _NAME_LENGTH.pack(len(name))
        + name
        + _ANSWERED_PARTITION.pack(1, 0, 0, 1, records_bytes)
    )
