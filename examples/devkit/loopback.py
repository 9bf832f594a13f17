"""Finds ports on the loopback address for brokers, and tells when one is taken."""

import itertools
import os
import random
import socket
from collections.abc import Iterable

from examples.devkit import BrokerError

HOST = "127.0.0.1"

_PORTS = range(20_000, 32_000)
_BLOCK = 240
"""A process takes ports of one block, in turn: of two that run side by side, whose ids are close,
neither finds free what the other is about to listen on."""

_turn = itertools.count(random.randrange(_BLOCK))


def free_ports(count: int) -> list[int]:
    """Return ports in a row on 127.0.0.1 that nobody listens on now.

    They lie below those which the system gives to outgoing connections. One of those could be
    taken by a client (even by one that tries to reconnect to it) while its broker is down.
    Raises `BrokerError` when there are none.
    """
    first = _PORTS.start + os.getpid() * _BLOCK % len(_PORTS)
    ports: list[int] = []
    for _ in range(_BLOCK):
        port = first + next(_turn) % _BLOCK
        if ports and port != ports[-1] + 1:
            ports.clear()
        ports.append(port)
        if not _is_free(port):
            ports.clear()
        if len(ports) == count:
            return ports
    what = f"No free port was found from {first} to {first + _BLOCK - 1}."
    raise BrokerError(what, "Close programs that listen there.")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def require_free(ports: Iterable[int]) -> None:
    """Raise `BrokerError` unless each of the ports on 127.0.0.1 can be listened on."""
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except (OSError, OverflowError) as error:
                what = f"The broker can't listen on {HOST}:{port}: {error}"
                raise BrokerError(what, "Give it another port, or 0 for any free one.") from error
