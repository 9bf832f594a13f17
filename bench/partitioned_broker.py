"""A stand-in broker with one topic of many partitions that are all alike.

Answers ApiVersions, Metadata and ListOffsets, which is all that a proxy asks of a cluster whose
partitions it follows.
"""

import argparse
import socket
import struct
import threading

from kafka.protocol.consumer.offsets import ListOffsetsRequest, ListOffsetsResponse
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest, MetadataResponse

from bench import traffic

TOPIC = "partitioned"
LOG_END = 2_000_000
EARLIEST = -2
LOG_START = 0
NO_TIMESTAMP = -1
_REQUEST_HEAD = struct.Struct(">hhi")


def main() -> None:
    """Serve on the listener that the parent passed as a file descriptor, until it is ended."""
    parser = argparse.ArgumentParser(prog="bench.partitioned_broker", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="a listening socket")
    parser.add_argument("--partitions", type=int, required=True)
    options = parser.parse_args()
    listener = socket.socket(fileno=options.fd)
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_serve, args=(connection, options.partitions), daemon=True).start()


def _serve(connection: socket.socket, partitions: int) -> None:
    with connection:
        try:
            while True:
                frame = traffic.receive_frame(connection)[traffic.LENGTH_BYTES :]
                connection.sendall(_answer(frame, partitions, connection.getsockname()))
        except (ConnectionError, ValueError):
            return


def _answer(frame: bytes, partitions: int, address: traffic.Address) -> bytes:
    api_key, version, correlation_id = _REQUEST_HEAD.unpack_from(frame)
    if api_key == ApiVersionsRequest.API_KEY:
        return traffic.api_versions_response(version, correlation_id)
    if api_key == MetadataRequest.API_KEY:
        question = MetadataRequest.decode(frame, version=version, header=True)
        asked = {each.name for each in question.topics or ()}
        response = _metadata(version, partitions if TOPIC in asked else 0, address)
    elif api_key == ListOffsetsRequest.API_KEY:
        request = ListOffsetsRequest.decode(frame, version=version, header=True)
        response = ListOffsetsResponse[version](topics=list(map(_offsets, request.topics)))
    else:
        raise ValueError(f"API {api_key} is not served")
    response.with_header(correlation_id=correlation_id)
    return bytes(response.encode(header=True, framed=True))


def _metadata(version: int, partitions: int, address: traffic.Address) -> MetadataResponse:
    topic = MetadataResponse.MetadataResponseTopic
    node_id = traffic.NODE_ID
    described = [
        topic.MetadataResponsePartition(
            partition_index=number,
            leader_id=node_id,
            replica_nodes=[node_id],
            isr_nodes=[node_id],
        )
        for number in range(partitions)
    ]
    host, port = address
    return MetadataResponse[version](
        brokers=[MetadataResponse.MetadataResponseBroker(node_id=node_id, host=host, port=port)],
        controller_id=node_id,
        topics=[topic(name=TOPIC, partitions=described)] if described else [],
    )


def _offsets(
    asked: ListOffsetsRequest.ListOffsetsTopic,
) -> ListOffsetsResponse.ListOffsetsTopicResponse:
    answered = ListOffsetsResponse.ListOffsetsTopicResponse
    return answered(
        name=asked.name,
        partitions=[
            answered.ListOffsetsPartitionResponse(
                partition_index=each.partition_index,
                timestamp=NO_TIMESTAMP,
                offset=LOG_START if each.timestamp == EARLIEST else LOG_END,
            )
            for each in asked.partitions
        ],
    )


if __name__ == "__main__":
    main()
