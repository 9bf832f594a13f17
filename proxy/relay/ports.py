"""Opens listening ports, by oneself or beside the process that one is to replace."""

import socket
from array import array
from struct import Struct

BACKLOG = 1024

_SO_ATTACH_REUSEPORT_CBPF = 51
"""Linux; the socket module has no name for it."""

_BPF_RETURN = 0x06
"""Classic BPF's `ret #k`: of a program that chooses a socket, the chosen one's index."""

_NEWCOMER = 1
"""Index of the second process's socket; the first one's is 0."""

_INSTRUCTION = Struct("HBBI")
"""Linux's sock_filter: code, two jumps, constant."""

_PROGRAM = Struct("HP")
"""Linux's sock_fprog: how many instructions, and where they are."""


def open_port(host: str, port: int, *, beside: bool) -> socket.socket:
    """Return a listening socket; nobody accepts on it yet. Raises OSError.

    Every port may be shared with a later process of the same user, so that it can take over. With
    `beside` that other process is there already, and all new connections come here from now on;
    otherwise a port that somebody has is an error.
    """
    if not beside and port:
        _bind(host, port, shared=False).close()
    sock = _bind(host, port, shared=True)
    try:
        sock.listen(BACKLOG)
        if beside:
            _steer_here(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def _steer_here(sock: socket.socket) -> None:
    """Send new connections to this socket of the group that shares the port.

    Without this the kernel spreads them, and those that the old process has not accepted when it
    closes its socket are reset. When it has gone, the index is out of range and the kernel falls
    back to spreading, over one socket then.
    """
    instructions = array("Q", _INSTRUCTION.pack(_BPF_RETURN, 0, 0, _NEWCOMER))
    address, count = instructions.buffer_info()
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, _PROGRAM.pack(count, address))
