"""Kafka messages of the bench, built and read with kafka-python's schema codec."""

import socket
import uuid
from dataclasses import dataclass
from functools import cache
from typing import Any

from kafka.protocol.consumer.fetch import FetchRequest, FetchResponse
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)
from kafka.record.default_records import DefaultRecordBatchBuilder

Address = tuple[str, int]

NODE_ID = 0
TOPIC = "bench"
TOPIC_ID = uuid.UUID(bytes=b"bench-topic-uuid")
CLUSTER_ID = "bench"
OFFSET = 0
EVERYTHING_READ = 1
RECORD_TIME_MS = 1_700_000_000_000
SMALL_VALUE_BYTES = 100
CORRELATION_ID_END = 8
FIT_ATTEMPTS = 3
FIRST_FIT_OVERHEAD_BYTES = 200
METADATA_VERSION = 12
API_VERSIONS_VERSION = 3
UNSUPPORTED_VERSION = 35
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Frame:
    """Length in bytes (4 length bytes included) and correlation id of a response."""

    frame_bytes: int
    correlation_id: int


def fetch_request(version: int, client_id: str, response_bytes: int) -> bytearray:
    """Frame of a Fetch that our generator answers with `response_bytes` in all.

    Raises:
        ValueError: kafka-python does not know the version.

    """
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=0, fetch_offset=OFFSET, partition_max_bytes=response_bytes
    )
    topic = FetchRequest.FetchTopic(topic=TOPIC, topic_id=TOPIC_ID, partitions=[partition])
    request = FetchRequest[version](
        max_wait_ms=500, min_bytes=1, max_bytes=response_bytes, topics=[topic]
    )
    request.with_header(correlation_id=0, client_id=client_id)
    return bytearray(request.encode(header=True, framed=True))


def fetch_response(version: int, response_bytes: int) -> bytes:
    """Fetch response of one partition with one valid record, `response_bytes` long.

    The record's value is filled to that length; where a varint makes it impossible the frame is
    a byte or two off.
    """
    value_bytes = max(SMALL_VALUE_BYTES, response_bytes - FIRST_FIT_OVERHEAD_BYTES)
    frame = _fetch_response_of_value(version, value_bytes)
    for _ in range(FIT_ATTEMPTS):
        if len(frame) == response_bytes:
            break
        value_bytes = max(0, value_bytes + response_bytes - len(frame))
        frame = _fetch_response_of_value(version, value_bytes)
    return frame


@cache
def small_response_bytes(version: int) -> int:
    """Length of a Fetch response that carries one record of 100 bytes."""
    return len(_fetch_response_of_value(version, SMALL_VALUE_BYTES))


def asked_response_bytes(version: int, body: bytes) -> int:
    """Length of the response that a Fetch request's header and body ask for."""
    return int(FetchRequest.decode(body, version=version, header=True).max_bytes)


def api_versions_request(client_id: str) -> bytes:
    """Frame of the ApiVersions request with which clients open a connection."""
    request = ApiVersionsRequest[API_VERSIONS_VERSION](
        client_software_name="bench", client_software_version="1"
    )
    request.with_header(correlation_id=0, client_id=client_id)
    return bytes(request.encode(header=True, framed=True))


def api_versions_response(version: int, correlation_id: int) -> bytes:
    """ApiVersions response naming the three APIs that the generator serves."""
    known = version <= ApiVersionsResponse.max_version
    answer = ApiVersionsResponse[version if known else 0]
    served = [
        ApiVersionsResponse.ApiVersion(api_key=api.API_KEY, min_version=low, max_version=high)
        for api, (low, high) in (
            (request, request.valid_versions)
            for request in (FetchRequest, MetadataRequest, ApiVersionsRequest)
        )
    ]
    return _framed(
        answer(error_code=0 if known else UNSUPPORTED_VERSION, api_keys=served), correlation_id
    )


def metadata_response(version: int, correlation_id: int, address: Address) -> bytes:
    """Metadata response: one broker at `address` that leads the only partition."""
    host, port = address
    topics = MetadataResponse.MetadataResponseTopic
    partition = topics.MetadataResponsePartition(
        partition_index=0, leader_id=NODE_ID, replica_nodes=[NODE_ID], isr_nodes=[NODE_ID]
    )
    response = MetadataResponse[version](
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=NODE_ID, host=host, port=port)],
        cluster_id=CLUSTER_ID,
        controller_id=NODE_ID,
        topics=[topics(name=TOPIC, topic_id=TOPIC_ID, partitions=[partition])],
    )
    return _framed(response, correlation_id)


def advertised_address(bootstrap: Address, client_id: str) -> Address:
    """Ask `bootstrap` for the broker's address, as a client does before it fetches.

    Raises:
        OSError: no connection, or no answer in time.
        ValueError: the answer names no broker.

    """
    request = MetadataRequest[METADATA_VERSION](topics=None)
    request.with_header(correlation_id=0, client_id=client_id)
    with socket.create_connection(bootstrap, CONNECT_TIMEOUT_S) as connection:
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


def response_head(first_bytes: bytes | bytearray) -> Frame:
    """Read length and correlation id from a response's first 8 bytes."""
    return Frame(
        4 + int.from_bytes(first_bytes[:4], "big"),
        int.from_bytes(first_bytes[4:CORRELATION_ID_END], "big"),
    )


def _fetch_response_of_value(version: int, value_bytes: int) -> bytes:
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
    partition = FetchResponse.FetchableTopicResponse.PartitionData(
        partition_index=0,
        high_watermark=OFFSET + EVERYTHING_READ,
        last_stable_offset=OFFSET + EVERYTHING_READ,
        log_start_offset=OFFSET,
        aborted_transactions=None,
        records=bytes(builder.build()),
    )
    topic = FetchResponse.FetchableTopicResponse(
        topic=TOPIC, topic_id=TOPIC_ID, partitions=[partition]
    )
    return _framed(FetchResponse[version](responses=[topic]), 0)


def _framed(response: Any, correlation_id: int) -> bytes:
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True, framed=True))
