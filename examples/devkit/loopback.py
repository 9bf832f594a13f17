"""Finds ports on the loopback address for brokers, and tells when one is taken."""

import contextlib
import random
import socket
from collections.abc import Iterable

from examples.devkit import BrokerError

HOST = "127.0.0.1"

_PORTS = range(20_000, 32_000)
_PORT_TRIES = 100


def free_ports(count: int) -> list[int]:
    """Return ports on 127.0.0.1 that nobody listens on now.

    They lie below those which the system gives to outgoing connections. One of those could be
    taken by a client (even by one that tries to reconnect to it) while its broker is down.
    Raises `BrokerError` when there are none.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.sample(_PORTS, _PORT_TRIES):
            if len(ports) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                ports.append(port)
    if len(ports) < count:
        what = f"No free port was found from {_PORTS.start} to {_PORTS.stop - 1}."
        raise BrokerError(what, "Close programs that listen there.")
    return ports


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
