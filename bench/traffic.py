"""Kafka messages of the bench, built and read with kafka-python's schema codec."""

import socket
import struct
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from ssl import SSLContext
from typing import Any

from kafka.protocol.consumer.fetch import FetchRequest, FetchResponse
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.protocol.producer.produce import ProduceRequest, ProduceResponse
from kafka.record.default_records import DefaultRecordBatchBuilder

from proxy.wire.layout import encode_uvarint

Address = tuple[str, int]

NODE_ID = 0
TOPIC = "bench"
TOPIC_ID = uuid.UUID(bytes=b"bench-topic-uuid")
# What follows, and the id of the topic as a number, is the length of the topic's batches.
TOPIC_PREFIX = "batches-"
# Stands for the records where the codec builds what is around them.
PLACEHOLDER = b"<records>"
CLUSTER_ID = "bench"
OFFSET = 0
ONE_PARTITION = range(1)
EVERYTHING_READ = 1
RECORD_TIME_MS = 1_700_000_000_000
SMALL_VALUE_BYTES = 100
LENGTH_BYTES = 4
CORRELATION_ID_END = 8
FIT_ATTEMPTS = 3
FIRST_FIT_OVERHEAD_BYTES = 200
METADATA_VERSION = 12
PRODUCE_TIMEOUT_MS = 30_000
NO_ACKS = 0
API_VERSIONS_VERSION = 4
# The last ones of Kafka's Java client 3.9 and 4.0.
CLIENT_VERSIONS = {FetchRequest.API_KEY: 17, ProduceRequest.API_KEY: 12}
UNSUPPORTED_VERSION = 35
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What a Fetch asks for.

    Attributes:
        batch_bytes: length of its topic's batches.
        max_bytes: its limit.
        partitions: of the topic.
        offset: from which on, in each of them.

    """

    batch_bytes: int
    max_bytes: int
    partitions: range = ONE_PARTITION
    offset: int = OFFSET


def fetch_request(
    version: int,
    client_id: str,
    max_bytes: int,
    batch_bytes: int,
    partitions: range = ONE_PARTITION,
    offset: int = OFFSET,
) -> bytearray:
    """Frame of a Fetch for at most `max_bytes` of a topic whose record batches are this long.

    Each partition has an equal part of the limit.
    """
    wanted = [
        FetchRequest.FetchTopic.FetchPartition(
            partition=index,
            fetch_offset=offset,
            partition_max_bytes=max_bytes // len(partitions),
        )
        for index in partitions
    ]
    topic = FetchRequest.FetchTopic(
        topic=topic_name(batch_bytes), topic_id=uuid.UUID(int=batch_bytes), partitions=wanted
    )
    request = FetchRequest[version](
        max_wait_ms=500, min_bytes=1, max_bytes=max_bytes, topics=[topic]
    )
    request.with_header(correlation_id=0, client_id=client_id)
    return bytearray(request.encode(header=True, framed=True))


def read_fetch(version: int, frame: bytes) -> Asked:
    """Read from a Fetch request how much of which topic it asks for."""
    request = FetchRequest.decode(frame[LENGTH_BYTES:], version=version, header=True)
    topic = request.topics[0]
    in_partitions = sum(partition.partition_max_bytes for partition in topic.partitions)
    batch_bytes = _batch_bytes(topic.topic) if topic.topic else topic.topic_id.int
    max_bytes = min(request.max_bytes, in_partitions)
    first, last = topic.partitions[0], topic.partitions[-1]
    partitions = range(first.partition, last.partition + 1)
    return Asked(batch_bytes, max_bytes, partitions, first.fetch_offset)


def fetch_envelope(version: int, batch_bytes: int, records_bytes: int) -> tuple[bytes, bytes]:
    """Build what stands in a Fetch response before so many bytes of records, and behind them.

    It begins behind the correlation id.
    """
    partition = FetchResponse.FetchableTopicResponse.PartitionData(
        partition_index=0,
        high_watermark=OFFSET + EVERYTHING_READ,
        last_stable_offset=OFFSET + EVERYTHING_READ,
        log_start_offset=OFFSET,
        aborted_transactions=None,
        records=PLACEHOLDER,
    )
    topic = FetchResponse.FetchableTopicResponse(
        topic=topic_name(batch_bytes), topic_id=uuid.UUID(int=batch_bytes), partitions=[partition]
    )
    frame = _framed(FetchResponse[version](responses=[topic]), 0)
    before, after = frame[CORRELATION_ID_END:].split(PLACEHOLDER)
    is_flexible = FetchResponse[version].flexible_version_q(version)
    before = before.removesuffix(_length_field(len(PLACEHOLDER), is_flexible=is_flexible))
    return before + _length_field(records_bytes, is_flexible=is_flexible), after


def fetch_response(
    version: int, asked: Asked, session_id: int, records: bytes, log_end: int
) -> bytes:
    """Frame of a response with these records in each partition."""
    answered = FetchResponse.FetchableTopicResponse
    topic = answered(
        topic=topic_name(asked.batch_bytes),
        topic_id=uuid.UUID(int=asked.batch_bytes),
        partitions=[
            answered.PartitionData(
                partition_index=index,
                high_watermark=log_end,
                last_stable_offset=log_end,
                log_start_offset=OFFSET,
                aborted_transactions=None,
                records=records,
            )
            for index in asked.partitions
        ],
    )
    return _framed(FetchResponse[version](session_id=session_id, responses=[topic]), 0)


def batch_of_value(value_bytes: int) -> bytes:
    """Build a batch of one record with a value of so many bytes."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=2**31 - 1,
    )
    builder.append(OFFSET, RECORD_TIME_MS, None, bytes(value_bytes), [])
    return bytes(builder.build())


@cache
def record_batch(batch_bytes: int) -> bytes:
    """Build a valid batch of one record, `batch_bytes` long.

    Where a varint makes that length impossible the batch is a byte or two off.
    """
    value_bytes = max(0, batch_bytes - FIRST_FIT_OVERHEAD_BYTES)
    batch = batch_of_value(value_bytes)
    for _ in range(FIT_ATTEMPTS):
        if len(batch) == batch_bytes:
            break
        value_bytes = max(0, value_bytes + batch_bytes - len(batch))
        batch = batch_of_value(value_bytes)
    return batch


@cache
def small_batch_bytes() -> int:
    """Length of a batch with one record of 100 bytes."""
    return len(batch_of_value(SMALL_VALUE_BYTES))


def topic_name(batch_bytes: int) -> str:
    """Name of the topic whose record batches are so long."""
    return f"{TOPIC_PREFIX}{batch_bytes}"


def produce_request(
    version: int, client_id: str, topic: str, records: bytes, acks: int
) -> bytearray:
    """Frame of a Produce request with these records for a topic's first partition."""
    topic_data = ProduceRequest.TopicProduceData
    partition = topic_data.PartitionProduceData(index=0, records=records)
    request = ProduceRequest[version](
        transactional_id=None,
        acks=acks,
        timeout_ms=PRODUCE_TIMEOUT_MS,
        topic_data=[topic_data(name=topic, partition_data=[partition])],
    )
    request.with_header(correlation_id=0, client_id=client_id)
    return bytearray(request.encode(header=True, framed=True))


def produce_answer(version: int, frame: bytes) -> bytes:
    """Answer a Produce request without error; empty when it asks for no acknowledgement."""
    request = ProduceRequest.decode(frame[LENGTH_BYTES:], version=version, header=True)
    if request.acks == NO_ACKS:
        return b""
    answered = ProduceResponse.TopicProduceResponse
    response = ProduceResponse[version](
        responses=[
            answered(
                name=topic.name,
                partition_responses=[
                    answered.PartitionProduceResponse(index=partition.index)
                    for partition in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ]
    )
    return _framed(response, 0)


def api_versions_request(client_id: str) -> bytes:
    """Frame of the ApiVersions request with which clients open a connection."""
    request = ApiVersionsRequest[API_VERSIONS_VERSION](
        client_software_name="bench", client_software_version="1"
    )
    request.with_header(correlation_id=0, client_id=client_id)
    return bytes(request.encode(header=True, framed=True))


def negotiated_versions(connection: socket.socket, client_id: str) -> dict[int, int]:
    """Ask which versions there are, as a client does first; return which it uses, by API key.

    Raises:
        OSError: no connection, or no answer.
        ValueError: an error came back, or an API is missing.

    """
    connection.sendall(api_versions_request(client_id))
    answer = ApiVersionsResponse.decode(
        receive_frame(connection), version=API_VERSIONS_VERSION, header=True, framed=True
    )
    if answer.error_code:
        raise ValueError(f"ApiVersions: error {answer.error_code}")
    last = {api.api_key: api.max_version for api in answer.api_keys}
    if not CLIENT_VERSIONS.keys() <= last.keys():
        raise ValueError(f"ApiVersions: only {sorted(last)}")
    return {key: min(known, last[key]) for key, known in CLIENT_VERSIONS.items()}


def api_versions_response(version: int, correlation_id: int) -> bytes:
    """ApiVersions response naming the four APIs that the generator serves."""
    known = version <= ApiVersionsResponse.max_version
    answer = ApiVersionsResponse[version if known else 0]
    served = [
        ApiVersionsResponse.ApiVersion(api_key=api.API_KEY, min_version=low, max_version=high)
        for api, (low, high) in (
            (request, request.valid_versions)
            for request in (ProduceRequest, FetchRequest, MetadataRequest, ApiVersionsRequest)
        )
    ]
    return _framed(
        answer(error_code=0 if known else UNSUPPORTED_VERSION, api_keys=served), correlation_id
    )


def metadata_response(version: int, correlation_id: int, address: Address, frame: bytes) -> bytes:
    """Answer a Metadata request: one broker at `address` leads what was asked for."""
    host, port = address
    request = MetadataRequest.decode(frame[LENGTH_BYTES:], version=version, header=True)
    topics = MetadataResponse.MetadataResponseTopic
    partition = topics.MetadataResponsePartition(
        partition_index=0, leader_id=NODE_ID, replica_nodes=[NODE_ID], isr_nodes=[NODE_ID]
    )
    asked = [_named(topic.name, topic.topic_id) for topic in request.topics or ()]
    response = MetadataResponse[version](
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=NODE_ID, host=host, port=port)],
        cluster_id=CLUSTER_ID,
        controller_id=NODE_ID,
        topics=[
            topics(name=name, topic_id=topic_id, partitions=[partition])
            for name, topic_id in asked or [(TOPIC, TOPIC_ID)]
        ],
    )
    return _framed(response, correlation_id)


def advertised_address(
    bootstrap: Address, client_id: str, context: SSLContext | None = None
) -> Address:
    """Ask `bootstrap` for the broker's address, as a client does before it fetches.

    With `context`, by TLS.

    Raises:
        OSError: no connection, or no answer in time.
        ValueError: the answer names no broker.

    """
    request = MetadataRequest[METADATA_VERSION](topics=None)
    request.with_header(correlation_id=0, client_id=client_id)
    with ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(bootstrap, CONNECT_TIMEOUT_S))
        if context is not None:
            connection = stack.enter_context(context.wrap_socket(connection))
        connection.sendall(request.encode(header=True, framed=True))
        frame = receive_frame(connection)
    response = MetadataResponse.decode(frame, version=METADATA_VERSION, header=True, framed=True)
    if not response.brokers:
        raise ValueError(f"Metadata from {bootstrap[0]}:{bootstrap[1]} names no broker")
    return response.brokers[0].host, response.brokers[0].port


def receive_frame(connection: socket.socket) -> bytes:
    """Read one whole response from a blocking socket; raises ConnectionError at its end."""
    frame = bytearray()
    wanted_bytes = 4
    while len(frame) < wanted_bytes:
        chunk = connection.recv(wanted_bytes - len(frame))
        if not chunk:
            raise ConnectionError("the connection was closed in the middle of a response")
        frame += chunk
        if len(frame) == 4:
            wanted_bytes += int.from_bytes(frame, "big")
    return bytes(frame)


def response_head(first_bytes: bytes | bytearray) -> tuple[int, int]:
    """Read length, its own 4 bytes included, and correlation id from a response's first 8 bytes."""
    length, correlation_id = struct.unpack_from(">ii", first_bytes)
    return LENGTH_BYTES + length, correlation_id


def _batch_bytes(topic: str) -> int:
    """Read the length of a topic's batches from its name; raises ValueError if it is not there."""
    return int(topic.removeprefix(TOPIC_PREFIX))


def _named(name: str | None, topic_id: uuid.UUID) -> tuple[str, uuid.UUID]:
    """Return both the name and the id of a topic of which one is known."""
    if name is None:
        return topic_name(topic_id.int), topic_id
    if not name.startswith(TOPIC_PREFIX):
        return name, TOPIC_ID
    return name, uuid.UUID(int=_batch_bytes(name))


def _length_field(records_bytes: int, *, is_flexible: bool) -> bytes:
    return encode_uvarint(records_bytes + 1) if is_flexible else records_bytes.to_bytes(4, "big")


def _framed(response: Any, correlation_id: int) -> bytes:
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True, framed=True))
