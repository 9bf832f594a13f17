"""One who writes and reads without pause, whatever happens to who serves it."""

import threading
import time
from contextlib import suppress

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, Producer, TopicPartition
from support.proxy_process import until

PAUSE_S = 0.01
GOES_ON = 30
"""Records that show that a client goes on."""
GOES_ON_LIMIT_S = 60.0
JOIN_S = 60.0


class Steady:
    """Use it as a context; in the end each record must be there once, in its order."""

    def __init__(self, bootstrap: str, client_id: str, topic: str, timeout_s: float) -> None:
        """`timeout_s`: how long it waits for an answer."""
        common = {"bootstrap.servers": bootstrap, "client.id": client_id, "log_level": 0}
        common |= {"reconnect.backoff.max.ms": 500, "socket.timeout.ms": int(timeout_s * 1000)}
        self._producer = Producer(common | {"enable.idempotence": True, "linger.ms": 0})
        self._consumer = Consumer(common | {"group.id": client_id, "enable.auto.commit": False})
        self._consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        self._topic, self._client_id = topic, client_id
        self._ends = threading.Event()
        self.read: list[int] = []
        self.written = 0
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._write, self._read)
        ]

    def __enter__(self) -> "Steady":
        for thread in self._threads:
            thread.start()
        try:
            self.goes_on()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._end()
        if kind is None:
            assert self._producer.flush(JOIN_S) == 0
            deadline_s = time.monotonic() + JOIN_S
            while len(self.read) < self.written and time.monotonic() < deadline_s:
                self._take()
            assert self.read == list(range(self.written))
        self._consumer.close()

    def _end(self) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    def goes_on(self, limit_s: float = GOES_ON_LIMIT_S) -> float:
        """Wait until more was written and read; return after how many seconds."""
        began_s, goal = time.monotonic(), self.written + GOES_ON
        until(lambda: len(self.read) >= goal, f"{self._client_id} goes on", limit_s)
        return time.monotonic() - began_s

    def _write(self) -> None:
        while not self._ends.is_set():
            self._producer.produce(self._topic, b"%08d" % self.written)
            self.written += 1
            self._producer.poll(PAUSE_S)
            time.sleep(PAUSE_S)

    def _read(self) -> None:
        while not self._ends.is_set():
            self._take()

    def _take(self) -> None:
        with suppress(KafkaException):
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.read.append(int(message.value()))
