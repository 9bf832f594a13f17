"""A Kafka client that does exactly what a test says: one socket, requests made by the codec."""

import itertools
import socket
import ssl
import struct
import time
import uuid
from typing import Any, Self

from kafka.record.memory_records import MemoryRecordsBuilder

from proxy.wire.apis import API_VERSIONS, APIS, FETCH, LIST_OFFSETS, PRODUCE

TIMEOUT_S = 30
_MAGIC = 2
_CHUNK_BYTES = 1 << 20
_WRITTEN_MS = int(time.time() * 1000)
"""The same in all records of a run, and recent: brokers delete what is older than retention."""


def message(api_key: int, version: int, **fields: Any) -> Any:
    """Make a request of plain fields."""
    return APIS[api_key].request(version=version, **fields)


def api_versions(version: int) -> Any:
    """Make an ApiVersions request; from version 3 on brokers want the client's name."""
    return message(API_VERSIONS, version, client_software_name="raw", client_software_version="1")


def fetch(
    version: int,
    topic: str,
    *,
    topic_id: uuid.UUID | None = None,
    partition: int = 0,
    offset: int = 0,
    max_bytes: int = 1 << 20,
    max_wait_ms: int = 0,
    min_bytes: int = 0,
) -> Any:
    """Make a full Fetch of one partition; from version 13 on it takes the topic's id."""
    request = APIS[FETCH].request
    part = request.FetchTopic.FetchPartition(
        partition=partition, fetch_offset=offset, partition_max_bytes=max_bytes
    )
    wanted = request.FetchTopic(topic=topic, topic_id=topic_id, partitions=[part])
    return request(
        version=version,
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        topics=[wanted],
    )


def list_offsets(topic: str, timestamp: int) -> Any:
    """Return a look-up of an offset of partition 0, by EARLIEST, LATEST or a time."""
    request = message(LIST_OFFSETS, 7, replica_id=-1, isolation_level=0)
    wanted = type(request).ListOffsetsTopic
    partition = wanted.ListOffsetsPartition(
        partition_index=0, current_leader_epoch=-1, timestamp=timestamp
    )
    request.topics = [wanted(name=topic, partitions=[partition])]
    return request


def produce(
    version: int,
    topic: str,
    *values: bytes,
    topic_id: uuid.UUID | None = None,
    partition: int = 0,
    acks: int = 1,
) -> Any:
    """Make a Produce of one batch; from version 13 on it takes the topic's id."""
    request = APIS[PRODUCE].request
    data = request.TopicProduceData
    part = data.PartitionProduceData(index=partition, records=records(*values))
    return request(
        version=version,
        acks=acks,
        timeout_ms=TIMEOUT_S * 1000,
        topic_data=[data(name=topic, topic_id=topic_id, partition_data=[part])],
    )


def records(*values: bytes) -> bytes:
    """Make one uncompressed batch."""
    size = sum(map(len, values)) + 100 * len(values) + 1000
    builder = MemoryRecordsBuilder(_MAGIC, 0, size)
    for value in values:
        builder.append(timestamp=_WRITTEN_MS, key=None, value=value)
    builder.close()
    return bytes(builder.buffer())


class RawClient:
    """One connection. A context manager."""

    def __init__(
        self,
        address: str,
        client_id: str | None = "raw",
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
        receive_buffer_bytes: int | None = None,
        source: str = "",
    ) -> None:
        """Connect from the address `source`, if one is given."""
        host, _, port = address.rpartition(":")
        self.client_id = client_id
        self.sock = socket.socket()
        if receive_buffer_bytes is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.sock.settimeout(TIMEOUT_S)
        if source:
            self.sock.bind((source, 0))
        self.sock.connect((host, int(port)))
        if tls is not None:
            self.sock = tls.wrap_socket(self.sock, server_hostname=server_name or host)
        self._ids = itertools.count(1)
        self._asked: list[tuple[int, int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def encode(self, request: Any, *, answered: bool = True) -> bytes:
        """Make the frame of a request, to be answered in this order."""
        number = next(self._ids)
        request.with_header(correlation_id=number, client_id=self.client_id)
        if answered:
            self._asked.append((number, request.API_KEY, request.API_VERSION))
        return bytes(request.encode(header=True, framed=True))

    def send(self, *requests: Any, answered: bool = True) -> None:
        """Send requests at once."""
        self.sock.sendall(b"".join(self.encode(each, answered=answered) for each in requests))

    def receive(self) -> Any:
        """Return the next response; it must belong to the oldest unanswered request."""
        number, api_key, version = self._asked.pop(0)
        frame = self.receive_frame()
        assert struct.unpack_from(">i", frame) == (number,)
        return APIS[api_key].response.decode(frame, version=version, header=True)

    def forget(self) -> None:
        """Take the oldest request as answered."""
        self._asked.pop(0)

    def receive_frame(self) -> bytes:
        """Return the next frame without its length."""
        (length,) = struct.unpack(">i", self.read(4))
        return self.read(length)

    def ask(self, request: Any) -> Any:
        """Send a request, return its response."""
        self.send(request)
        return self.receive()

    def read(self, count: int) -> bytes:
        """Read so many bytes."""
        data = bytearray()
        while len(data) < count:
            part = self.sock.recv(min(count - len(data), _CHUNK_BYTES))
            if not part:
                raise ConnectionError(f"closed after {len(data)} of {count} bytes")
            data += part
        return bytes(data)

    def is_closed_by_peer(self) -> bool:
        """Wait for the end of the stream; False when bytes come instead."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionError:
            return True
