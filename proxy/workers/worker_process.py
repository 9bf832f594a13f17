"""Be a worker, in a process of its own."""

import signal
import socket

import uvloop

from proxy.member import prepare_process
from proxy.workers.nursery import receive_sockets
from proxy.workers.worker import EXIT_LOST, Worker


def run_worker(control: socket.socket, state: socket.socket) -> int:
    """Work until the supervisor ends it; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor says what is to be done
    try:
        sockets = receive_sockets(control)
    except OSError:
        return EXIT_LOST
    prepare_process()
    return uvloop.run(_work(control, state, sockets))


async def _work(control: socket.socket, state: socket.socket, sockets: list[socket.socket]) -> int:
    return await Worker(control, state, sockets).run()
