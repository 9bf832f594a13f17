"""Those who connect, ask and leave, over and over, whatever happens to who answers."""

import socket
import threading
from collections import Counter

from support.proxy_process import HOST
from support.raw import api_versions

CALLERS = 3
CALL_TIMEOUT_S = 30


class Callers:
    """Threads that connect, ask and leave, over and over, and count how that went."""

    def __init__(self, port: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._port = port
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(CALLERS)]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CALL_TIMEOUT_S)

    def _run(self) -> None:
        request = api_versions(0)
        request.with_header(correlation_id=1, client_id="caller")
        frame = bytes(request.encode(framed=True, header=True))
        while not self._stop.is_set():
            self.outcomes[self._call(frame)] += 1

    def _call(self, frame: bytes) -> str:
        try:
            with socket.create_connection((HOST, self._port), CALL_TIMEOUT_S) as sock:
                sock.sendall(frame)
                return "answered" if sock.recv(4) else "closed"
        except OSError as error:
            return type(error).__name__
