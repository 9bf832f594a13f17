"""Runs real Kafka brokers (KRaft) as child processes that end with this one.

A broker is started as `kafka.Kafka` on its data folder, which `kafka.tools.StorageTool` formats the
first time. It listens on 127.0.0.1 only and is meant for demos, tests and benchmarks.
"""

import base64
import contextlib
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from proxy.devkit import BrokerError
from proxy.devkit.jars import Progress, find_java, kafka_jars

HOST = "127.0.0.1"

QUICK_START = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""JVM options for a small broker that starts fast. A broker under load is better off with a larger
heap and without the last one, which keeps the optimising compiler out."""

_LOG_OPTIONS = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
_PORTS = range(20_000, 32_000)
_PORT_TRIES = 100
_POLL_S = 0.1
_ANSWER_TIMEOUT_S = 5.0
_FORMAT_TIMEOUT_S = 120.0
_TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024
_METADATA_VERSION = 1
_NAME = re.compile(r"[A-Za-z0-9._-]+")

# The JVM is started through these lines: they ask Linux to kill it when the thread that started it
# ends (prctl PR_SET_PDEATHSIG = 1; it holds across exec), and look if that has happened already.
_TIED_EXEC = (
    "import os, sys; parent, command = int(sys.argv[1]), sys.argv[2:]\n"
    "if sys.platform == 'linux':\n"
    "    import ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
    "    if os.getppid() != parent: sys.exit('the parent is gone')\n"
    "os.execv(command[0], command)"
)

_PROPERTIES = {
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": (
        "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT"
    ),
    # One broker holds the only copy, and the inner topics have few partitions to load.
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    # The default takes 128 MiB of the heap.
    "log.cleaner.dedupe.buffer.size": "4194304",
}


@dataclass(frozen=True, slots=True)
class Quorum:
    """The controller that the brokers of one cluster share; `port` is its own, not a client's."""

    cluster_id: str
    controller_id: int
    port: int


class EmbeddedBroker:
    """One broker of Apache Kafka 4.1 on 127.0.0.1; a context manager that starts and stops it.

    It may be killed and started again on the same ports and data. The child process ends with
    this object, and with this process however that ends (the latter on Linux).

    - `data_dir` holds records, configuration and log. It is created if absent, and formatted only
      when it holds no formatted storage yet.
    - `port` is that of the plaintext listener; 0 picks a free one.
    - `sasl_users` (passwords by name, both of `A-Z a-z 0-9 . _ -`) adds the SASL_PLAINTEXT listener
      `sasl_bootstrap` with PLAIN and SCRAM-SHA-256. SCRAM knows the users of the formatting.
    - `num_partitions` is for topics that are created without a count.
    - `properties` are Kafka's server properties; they win over all that this class sets.
    - `node_id` must stay the same for the same data.
    - `quorum` is the controller to use; None makes the broker its own.
    - `jvm_options` replace `QUICK_START`.
    - `progress` is told of the download when Kafka's jars are not cached.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        sasl_users: Mapping[str, str] | None = None,
        num_partitions: int = 1,
        properties: Mapping[str, str] | None = None,
        node_id: int = 1,
        quorum: Quorum | None = None,
        jvm_options: Sequence[str] = QUICK_START,
        progress: Progress | None = None,
    ) -> None:
        self.data_dir = data_dir.resolve()
        self.node_id = node_id
        self.log_file = self.data_dir / "broker.log"
        """What Kafka prints, all starts after one another."""
        ports = [free for free in free_ports(4) if free != port]
        self.port = port or ports[0]
        self.sasl_port = ports[1] if sasl_users else None
        self.quorum = quorum or Quorum(_new_cluster_id(), node_id, ports[2])
        self._sasl_users = dict(sasl_users or {})
        if not all(map(_NAME.fullmatch, (*self._sasl_users, *self._sasl_users.values()))):
            raise ValueError("SASL user names and passwords are made of A-Z a-z 0-9 . _ -")
        self._num_partitions = num_partitions
        self._properties = dict(properties or {})
        self._jvm_options = tuple(jvm_options)
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        # The kernel ties the child to the thread that starts it, not to the whole process. So that
        # a broker started from a passing thread lives on, one thread of its own starts it.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix=f"broker-{node_id}")

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT` of the plaintext listener."""
        return f"{HOST}:{self.port}"

    @property
    def sasl_bootstrap(self) -> str:
        """`HOST:PORT` of the SASL listener; ValueError without SASL users."""
        if self.sasl_port is None:
            raise ValueError("this broker has no SASL listener: give it sasl_users")
        return f"{HOST}:{self.sasl_port}"

    @property
    def pid(self) -> int | None:
        """Process id while the broker runs, else None."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the broker and return once it serves; do nothing when it runs.

        Downloads Kafka first if it is not cached, which does not count against `timeout_s`. After
        a kill the controller takes the broker back when its last session is over, about 10 s later
        (Kafka's `broker.session.timeout.ms`).

        Raises one of the kinds of `DevkitError`: no Java, no jars, a port is taken, the folder
        can't be used; or the broker ended or did not serve in time: then it is killed, and the
        message has the end of its log.
        """
        if self.pid is not None:
            return
        java = find_java()
        class_path = os.pathsep.join(map(str, kafka_jars(self._progress)))
        command = [str(java), *self._jvm_options, "-cp", class_path]
        self._require_ports()
        try:
            config = self._write_config()
            with self.log_file.open("ab") as log:
                self._log_start = log.tell()
                if not (self._storage_dir / "meta.properties").exists():
                    self._format(command, config)
                self._process = self._starter.submit(
                    subprocess.Popen,
                    [
                        *(sys.executable, "-I", "-S", "-c", _TIED_EXEC, str(os.getpid())),
                        *(*command, *_LOG_OPTIONS, "kafka.Kafka", str(config)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C in the terminal is for the parent, which stops it
                ).result()
        except OSError as error:
            raise BrokerError(
                f"The broker can't use {self.data_dir}: {error}",
                "Choose a folder that you may write to.",
            ) from error
        try:
            self._await_serving(timeout_s)
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout_s: float = 15.0) -> None:
        """Shut the broker down in order, or kill it when that takes longer; it may start again."""
        if self._process is not None:
            self._process.terminate()
            if not self.wait(timeout_s):
                self.kill()

    def kill(self) -> None:
        """End the broker at once, as a crash does (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the broker has ended; False when it still runs after `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def nodes(self) -> set[int]:
        """Ask the broker which brokers of its cluster are up: their node ids.

        Raises OSError when it does not answer.
        """
        request = MetadataRequest(topics=[], version=_METADATA_VERSION)
        request.with_header()
        with socket.create_connection((HOST, self.port), _ANSWER_TIMEOUT_S) as connection:
            connection.sendall(request.encode(header=True, framed=True))
            (length,) = struct.unpack(">i", _read_exactly(connection, 4))
            body = _read_exactly(connection, length)
        response = MetadataResponse.decode(body, version=_METADATA_VERSION, header=True)
        return {int(broker.node_id) for broker in response.brokers}

    def log_tail(self) -> str:
        """Give the last lines that the broker printed since its latest start."""
        with self.log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])

    @property
    def _storage_dir(self) -> Path:
        return self.data_dir / "storage"

    @property
    def _is_controller(self) -> bool:
        return self.quorum.controller_id == self.node_id

    def _require_ports(self) -> None:
        ports = [self.port, self.sasl_port, self.quorum.port if self._is_controller else None]
        for port in filter(None, ports):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except (OSError, OverflowError) as error:
                    raise BrokerError(
                        f"The broker can't listen on {HOST}:{port}: {error}",
                        "Give it another port, or 0 for any free one.",
                    ) from error

    def _write_config(self) -> Path:
        listeners = [f"PLAINTEXT://{self.bootstrap}"]
        values = {
            **_PROPERTIES,
            "node.id": str(self.node_id),
            "log.dirs": str(self._storage_dir),
            "num.partitions": str(self._num_partitions),
            "controller.quorum.voters": f"{self.quorum.controller_id}@{HOST}:{self.quorum.port}",
        }
        if self.sasl_port is not None:
            listeners.append(f"SASL_PLAINTEXT://{self.sasl_bootstrap}")
            values |= _sasl_properties(self._sasl_users)
        values["advertised.listeners"] = ",".join(listeners)
        values["process.roles"] = "broker"
        if self._is_controller:
            values["process.roles"] = "broker,controller"
            listeners.append(f"CONTROLLER://{HOST}:{self.quorum.port}")
        values["listeners"] = ",".join(listeners)
        values |= self._properties
        self.data_dir.mkdir(parents=True, exist_ok=True)
        path = self.data_dir / "server.properties"
        # Within a line, JSON's escapes are those of a Java properties file.
        lines = [f"{key}={json.dumps(value)[1:-1]}\n" for key, value in values.items()]
        path.write_text("".join(lines), encoding="ascii")
        return path

    def _format(self, command: Sequence[str], config: Path) -> None:
        """Format the storage; Kafka writes `meta.properties` last, so half of it does not count."""
        scram = [
            argument
            for name, password in self._sasl_users.items()
            for argument in ("--add-scram", f"SCRAM-SHA-256=[name={name},password={password}]")
        ]
        arguments = ["-t", self.quorum.cluster_id, "-c", str(config), *scram, "--ignore-formatted"]
        result = subprocess.run(
            [*command, "kafka.tools.StorageTool", "format", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_FORMAT_TIMEOUT_S,
            check=False,
        )
        if result.returncode != 0:
            raise BrokerError(
                f"The storage in {self.data_dir} can't be formatted:\n{result.stdout.strip()}",
                "Choose another folder, or mend the server properties that you gave.",
            )

    def _await_serving(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.wait(_POLL_S):
            with contextlib.suppress(OSError):
                if self.node_id in self.nodes():
                    return
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"The broker does not serve after {timeout_s:g} s. Its log ends with:\n"
                    f"{self.log_tail()}",
                    f"Read {self.log_file}; a loaded machine may need a longer time.",
                )
        assert self._process is not None
        raise BrokerError(
            f"The broker ended with status {self._process.returncode} before it served. "
            f"Its log ends with:\n{self.log_tail()}",
            f"Read {self.log_file} and mend what it names.",
        )


class EmbeddedCluster:
    """Some brokers in one cluster, the first of which is the controller too; a context manager.

    Node ids are 1 to `count`, which must stay the same for the same data; each broker has its own
    folder in `data_dir`. `properties` and `progress` are those of every `EmbeddedBroker`.
    """

    def __init__(
        self,
        data_dir: Path,
        count: int,
        *,
        properties: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        (controller_port,) = free_ports(1)
        quorum = Quorum(_new_cluster_id(), 1, controller_port)
        self.brokers = tuple(
            EmbeddedBroker(
                data_dir / f"broker-{node_id}",
                properties=properties,
                node_id=node_id,
                quorum=quorum,
                progress=progress,
            )
            for node_id in range(1, count + 1)
        )
        """All brokers in the order of their node ids."""

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT` of each broker, separated by commas."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 90.0) -> None:
        """Start all brokers side by side and return once each of them knows all.

        Raises as `EmbeddedBroker.start` when one could not be started; the others are stopped.
        """
        deadline = time.monotonic() + timeout_s
        try:
            with ThreadPoolExecutor(len(self.brokers)) as pool:
                list(pool.map(lambda broker: broker.start(timeout_s), self.brokers))
            everyone = {broker.node_id for broker in self.brokers}
            for broker in self.brokers:
                while broker.nodes() != everyone:
                    if time.monotonic() > deadline:
                        raise BrokerError(
                            f"The brokers have not found one another after {timeout_s:g} s.",
                            f"Read the logs, {broker.log_file} and beside it.",
                        )
                    broker.wait(_POLL_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop all brokers; the controller last, as the others take leave of it."""
        for broker in reversed(self.brokers):
            broker.stop()


def serve_broker(port: int, data_dir: Path) -> int:
    """Run one broker until SIGTERM or SIGINT: the whole of `quota-proxy broker`.

    Prints the download's progress to stderr and, once the broker serves, `ready HOST:PORT` on a
    line of its own to stdout. Call it from the main thread.
    Gives 0 after a signal, 1 when the broker ended by itself; raises as `EmbeddedBroker.start`.
    """
    broker = EmbeddedBroker(data_dir, port, progress=_print_progress)
    with _signals_interrupt(signal.SIGTERM, signal.SIGINT):
        try:
            broker.start()
            sys.stdout.write(f"ready {broker.bootstrap}\n")
            sys.stdout.flush()
            broker.wait()
        except KeyboardInterrupt:
            return 0
        finally:
            broker.stop()
    sys.stderr.write(f"the broker ended by itself; its log ends with:\n{broker.log_tail()}\n")
    return 1


def free_ports(count: int) -> list[int]:
    """Give ports on 127.0.0.1 that nobody listens on now.

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
        raise BrokerError(
            f"No free port was found from {_PORTS.start} to {_PORTS.stop - 1}.",
            "Close programs that listen there.",
        )
    return ports


def _sasl_properties(users: Mapping[str, str]) -> dict[str, str]:
    prefix = "listener.name.sasl_plaintext"
    module = "org.apache.kafka.common.security"
    logins = " ".join(f'user_{name}="{password}"' for name, password in users.items())
    return {
        f"{prefix}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        f"{prefix}.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required {logins};",
        f"{prefix}.scram-sha-256.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
    }


def _new_cluster_id() -> str:
    """Make an id as Kafka does: a random UUID in URL-safe base64, not to be taken for an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the broker closed the connection")
        parts += part
    return bytes(parts)


@contextlib.contextmanager
def _signals_interrupt(*signals: signal.Signals) -> Iterator[None]:
    """Let the first of the signals raise KeyboardInterrupt and the later ones do nothing."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_progress(done: int, found: int, name: str) -> None:
    what = f"downloaded {done} of {found}: {name}" if done else f"looking up jars ({found}): {name}"
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
