"""Frames of a Kafka client, made by kafka-python's codec, and a count of those that come back.

The correlation id of a Fetch is its version: an answer then tells where its throttle time is,
however many requests are under way.
"""

from typing import Any

from kafka.protocol.consumer.fetch import FetchRequest
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from bench import traffic

FETCH_VERSION = 12
OLDEST_FETCH_VERSION = 4
PRODUCE_VERSION = 7
SASL_VERSION = 1
LOGIN_ANSWERS = 2
"""To a login by PLAIN."""

THROTTLE_AT = {FETCH_VERSION: 9, OLDEST_FETCH_VERSION: 8}
"""Where a Fetch response of a version has its throttle time, counted from its length field."""
HEAD_BYTES = max(THROTTLE_AT.values()) + 4
"""No response to these requests is shorter."""


def fetch(topic: str, max_bytes: int, client_id: str | None, version: int = FETCH_VERSION) -> bytes:
    """Make a Fetch of a topic's first partition, from its start."""
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=0, fetch_offset=0, partition_max_bytes=max_bytes
    )
    topics = [FetchRequest.FetchTopic(topic=topic, partitions=[partition])]
    request = FetchRequest[version](max_wait_ms=0, min_bytes=0, max_bytes=max_bytes, topics=topics)
    return _framed(request, client_id, correlation_id=version)


def produce(topic: str, value_bytes: int, client_id: str, acks: int = 1) -> bytes:
    """Make a Produce of one record to a topic's first partition."""
    records = traffic.batch_of_value(value_bytes)
    return bytes(traffic.produce_request(PRODUCE_VERSION, client_id, topic, records, acks))


def login(user: str, password: str, client_id: str) -> bytes:
    """Make both requests of a login by PLAIN."""
    handshake = SaslHandshakeRequest[SASL_VERSION](mechanism="PLAIN")
    authenticate = SaslAuthenticateRequest[SASL_VERSION](
        auth_bytes=f"\0{user}\0{password}".encode()
    )
    return _framed(handshake, client_id) + _framed(authenticate, client_id)


class Answers:
    """Cuts a stream of responses into frames."""

    def __init__(self) -> None:
        self.told_ms = 0
        """The longest throttle time in a Fetch response."""
        self._head = bytearray()
        self._rest_bytes = 0

    def take(self, data: memoryview) -> int:
        """Take the next bytes; return how many responses they complete."""
        complete = 0
        while data:
            if not self._rest_bytes:
                wanted = HEAD_BYTES - len(self._head)
                self._head += data[:wanted]
                data = data[wanted:]
                if len(self._head) < HEAD_BYTES:
                    break
                self._begin()
            skipped = min(self._rest_bytes, len(data))
            self._rest_bytes -= skipped
            data = data[skipped:]
            complete += not self._rest_bytes
        return complete

    def _begin(self) -> None:
        """Read the head of a response."""
        self._rest_bytes = 4 + _int32(self._head, 0) - HEAD_BYTES
        throttle_at = THROTTLE_AT.get(_int32(self._head, 4))
        if throttle_at is not None:
            self.told_ms = max(self.told_ms, _int32(self._head, throttle_at))
        self._head.clear()


def _int32(data: bytearray, start: int) -> int:
    return int.from_bytes(data[start : start + 4], "big", signed=True)


def _framed(request: Any, client_id: str | None, correlation_id: int = 0) -> bytes:
    request.with_header(correlation_id=correlation_id, client_id=client_id)
    return bytes(request.encode(header=True, framed=True))
