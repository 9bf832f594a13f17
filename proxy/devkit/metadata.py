"""Asks a broker which brokers of its cluster are up."""

import socket
import struct

from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from proxy.devkit.ports import HOST

_ANSWER_TIMEOUT_S = 5.0
_METADATA_VERSION = 1
_LENGTH = struct.Struct(">i")


def ask_nodes(port: int) -> set[int]:
    """Give the node ids of the brokers that the one on this port of 127.0.0.1 knows to be up.

    Raises OSError when it does not answer.
    """
    request = MetadataRequest(topics=[], version=_METADATA_VERSION)
    request.with_header()
    with socket.create_connection((HOST, port), _ANSWER_TIMEOUT_S) as connection:
        connection.sendall(request.encode(header=True, framed=True))
        (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
        body = _read_exactly(connection, length)
    response = MetadataResponse.decode(body, version=_METADATA_VERSION, header=True)
    return {int(broker.node_id) for broker in response.brokers}


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the broker closed the connection")
        parts += part
    return bytes(parts)
