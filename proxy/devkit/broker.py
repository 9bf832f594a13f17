"""Runs one real Kafka broker (KRaft) as a child process that ends with this one.

A broker is started as `kafka.Kafka` on its data folder, which `kafka.tools.StorageTool` formats the
first time. It listens on 127.0.0.1 only and is meant for demos, tests and benchmarks.
"""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from proxy.devkit import BrokerError
from proxy.devkit.ivy import Progress
from proxy.devkit.jars import kafka_jars
from proxy.devkit.java import find_java
from proxy.devkit.metadata import ask_nodes
from proxy.devkit.ports import HOST, free_ports, require_free
from proxy.devkit.process import ServerProcess
from proxy.devkit.settings import BrokerSettings, Quorum, new_cluster_id
from proxy.devkit.storage import format_storage

QUICK_START = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""JVM options for a small broker that starts fast. A broker under load is better off with a larger
heap and without the last one, which keeps the optimising compiler out."""

_LOG_OPTIONS = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
_POLL_S = 0.1


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
        self.log_file = self.data_dir / "broker.log"
        """What Kafka prints, all starts after one another."""
        client_port, sasl_port, controller_port = _ports_besides(port)
        self.settings = BrokerSettings(
            node_id=node_id,
            quorum=quorum or Quorum(new_cluster_id(), node_id, controller_port),
            port=client_port,
            sasl_port=sasl_port if sasl_users else None,
            sasl_users=dict(sasl_users or {}),
            storage_dir=self.data_dir / "storage",
            num_partitions=num_partitions,
            properties=dict(properties or {}),
        )
        """How it is set up, for all its starts."""
        self._jvm_options = tuple(jvm_options)
        self._progress = progress
        self._process = ServerProcess(self.log_file)

    @property
    def port(self) -> int:
        """Port of the plaintext listener."""
        return self.settings.port

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT` of the plaintext listener."""
        return f"{HOST}:{self.port}"

    @property
    def sasl_bootstrap(self) -> str:
        """`HOST:PORT` of the SASL listener; ValueError without SASL users."""
        if self.settings.sasl_port is None:
            raise ValueError("this broker has no SASL listener: give it sasl_users")
        return f"{HOST}:{self.settings.sasl_port}"

    @property
    def pid(self) -> int | None:
        """Process id while the broker runs, else None."""
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the broker and return once it serves; do nothing when it runs.

        Downloads Kafka first if it is not cached, which does not count against `timeout_s`. After
        a kill the controller takes the broker back when its last session is over, about 2 s later
        (Kafka's `broker.session.timeout.ms`).

        Raises one of the kinds of `DevkitError`: no Java, no jars, a port is taken, the folder
        can't be used; or the broker ended or did not serve in time: then it is killed, and the
        message has the end of its log.
        """
        if self.pid is not None:
            return
        java = [str(find_java()), *self._jvm_options]
        java += ["-cp", os.pathsep.join(map(str, kafka_jars(self._progress)))]
        require_free(self.settings.ports)
        settings_file = self.data_dir / "server.properties"
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            settings_file.write_text(self.settings.file_text(), encoding="ascii")
            format_storage(java, self.settings, settings_file)
            self._process.start([*java, *_LOG_OPTIONS, "kafka.Kafka", str(settings_file)])
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
        self._process.stop(timeout_s)

    def kill(self) -> None:
        """End the broker at once, as a crash does (SIGKILL)."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the broker has ended; False when it still runs after `timeout_s`."""
        return self._process.wait(timeout_s)

    def nodes(self) -> set[int]:
        """Ask the broker which brokers of its cluster are up: their node ids.

        Raises OSError when it does not answer.
        """
        return ask_nodes(self.port)

    def log_tail(self) -> str:
        """Give the last lines that the broker printed since its latest start."""
        return self._process.log_tail()

    def _await_serving(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.wait(_POLL_S):
            with contextlib.suppress(OSError):
                if self.settings.node_id in self.nodes():
                    return
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"The broker does not serve after {timeout_s:g} s. Its log ends with:\n"
                    f"{self.log_tail()}",
                    f"Read {self.log_file}; a loaded machine may need a longer time.",
                )
        raise BrokerError(
            f"The broker ended with status {self._process.exit_status} before it served. "
            f"Its log ends with:\n{self.log_tail()}",
            f"Read {self.log_file} and mend what it names.",
        )


def _ports_besides(port: int) -> tuple[int, int, int]:
    """Give ports for three listeners, the first of which is `port` unless that is 0."""
    client_port, sasl_port, controller_port = [free for free in free_ports(4) if free != port][:3]
    return port or client_port, sasl_port, controller_port
