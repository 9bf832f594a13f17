"""The state of a machine, served to its workers over real sockets."""

import socket
from threading import Thread

from proxy.workers.machine_store import MachineStore, SocketTransport
from proxy.workers.state_server import StateServer

from proxy.state import MemoryStore

LIMIT_S = 5.0


class Machine:
    """A supervisor's store and the sockets of workers, each served by a thread."""

    def __init__(self, store=None):
        self.store = store or MemoryStore()
        self.server = StateServer(self.store)
        self.ways, self.threads = [], []

    def worker(self, timeout_s=LIMIT_S) -> MachineStore:
        here, there = socket.socketpair()
        thread = Thread(target=self.server.serve, args=(there,), daemon=True)
        thread.start()
        self.threads.append(thread)
        self.ways.append(SocketTransport(here, timeout_s))
        return MachineStore(self.ways[-1])

    def close(self):
        for way in self.ways:
            way.close()
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
