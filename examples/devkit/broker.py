"""Runs real Kafka brokers (KRaft), each a child process that ends with this one.

A broker is started as `kafka.Kafka` on its data folder, which `kafka.tools.StorageTool` formats the
first time. It listens on 127.0.0.1 only and is meant for demos, tests and benchmarks.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from examples.devkit import BrokerError
from examples.devkit.broker_settings import BrokerSettings, Quorum, new_cluster_id
from examples.devkit.ivy import OnDownload
from examples.devkit.jars import kafka_jars
from examples.devkit.java import find_java
from examples.devkit.loopback import HOST, free_ports, require_free
from examples.devkit.process import ServerProcess
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError

QUICK_START = ("-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""JVM options for a small broker that starts fast. A broker under load is better off with a larger
heap and without the last one, which keeps the optimising compiler out."""

_LOG_OPTIONS = (
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
)
_META_FILE, _CHECKPOINT_FILE = "meta.properties", "bootstrap.checkpoint"
_checkpoints: dict[frozenset[tuple[str, str]], bytes] = {}
"""By the users that are in them, with their passwords, and the properties that were checked for
them. They name no broker and no cluster."""
_POLL_S = 0.1
_FORMAT_TIMEOUT_S = 120.0
_CLUSTER_TIMEOUT_S = 90.0


class EmbeddedBroker(ServerProcess):
    """One broker of Apache Kafka 4.1 on 127.0.0.1; a context manager that starts and stops it.

    It may be killed and started again on the same ports and data.

    - `data_dir` holds records, configuration and log. It is created if absent, and formatted only
      when it holds no formatted storage yet.
    - `port` is that of the plaintext listener; 0 picks a free one.
    - `sasl_users` (passwords by name, both of `A-Z a-z 0-9 . _ -`) adds the SASL_PLAINTEXT listener
      `sasl_bootstrap` with PLAIN and SCRAM-SHA-256. SCRAM knows the users of the formatting.
    - `properties` are Kafka's server properties; they win over all that this class sets.
    - `node_id` must stay the same for the same data.
    - `quorum` is the controller to use; None makes the broker its own.
    - `jvm_options` replace `QUICK_START`.
    - `on_download` is called as the download goes on, when Kafka's jars are not cached.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 0,
        *,
        sasl_users: Mapping[str, str] | None = None,
        properties: Mapping[str, str] | None = None,
        node_id: int = 1,
        quorum: Quorum | None = None,
        jvm_options: Sequence[str] = QUICK_START,
        on_download: OnDownload | None = None,
    ) -> None:
        self.data_dir = data_dir.resolve()
        super().__init__(self.data_dir / "broker.log")
        client_port, sasl_port, controller_port, *_ = (
            free for free in free_ports(4) if free != port
        )
        self.settings = BrokerSettings(
            node_id=node_id,
            quorum=quorum or Quorum(new_cluster_id(), node_id, controller_port),
            port=port or client_port,
            sasl_port=sasl_port if sasl_users else None,
            sasl_users=dict(sasl_users or {}),
            storage_dir=self.data_dir / "storage",
            properties=dict(properties or {}),
        )
        self._jvm_options = tuple(jvm_options)
        self._on_download = on_download

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

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the broker and return once it serves; do nothing when it runs.

        Downloads Kafka first if it is not cached, which does not count against `timeout_s`. After
        a kill the controller takes the broker back when its last session is over, about 2 s later.
        Raises `DevkitError`; a broker that does not serve in time is killed.
        """
        if self.pid is not None:
            return
        java = [str(find_java()), *self._jvm_options]
        java += ["-cp", os.pathsep.join(map(str, kafka_jars(self._on_download)))]
        require_free(self.settings.ports)
        settings_file = self.data_dir / "server.properties"
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            settings_file.write_text(self.settings.file_text(), encoding="ascii")
            _format_storage(java, self.settings, settings_file)
            self.spawn([*java, *_LOG_OPTIONS, "kafka.Kafka", str(settings_file)])
        except OSError as error:
            fix = "Choose a folder that you may write to."
            raise BrokerError(f"The broker can't use {self.data_dir}: {error}", fix) from error
        try:
            self._await_serving(timeout_s)
        except BaseException:
            self.kill()
            raise

    def nodes(self) -> set[int]:
        """Return the ids of its cluster's brokers that it knows to be up; raises UpstreamError."""

        async def ask() -> set[int]:
            with contextlib.closing(KafkaClient(Bootstrap([(HOST, self.port)]))) as client:
                return {broker.node_id for broker in (await client.metadata()).brokers}

        # In a thread of its own: the caller's may be that of an event loop.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, ask()).result()

    def _await_serving(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.wait(_POLL_S):
            with contextlib.suppress(UpstreamError):
                if self.settings.node_id in self.nodes():
                    return
            if time.monotonic() > deadline:
                what = f"The broker does not serve after {timeout_s:g} s"
                how = f"Read {self.log_file}; a loaded machine may need a longer time."
                raise BrokerError(f"{what}. Its log ends with:\n{self.log_tail()}", how)
        what = f"The broker ended with status {self.exit_status} before it served"
        how = f"Read {self.log_file} and mend what it names."
        raise BrokerError(f"{what}. Its log ends with:\n{self.log_tail()}", how)


class EmbeddedCluster:
    """Some brokers in one cluster, the first of which is the controller too; a context manager.

    Node ids are 1 to `count`; each broker has a folder of its own in `data_dir`. All brokers run
    side by side and know one another, or none runs: `BrokerError` as from each of them.
    """

    def __init__(
        self, data_dir: Path, count: int, *, properties: Mapping[str, str] | None = None
    ) -> None:
        controller_port, *ports = free_ports(count + 1)
        quorum = Quorum(new_cluster_id(), 1, controller_port)
        self.brokers = tuple(
            EmbeddedBroker(
                data_dir / f"broker-{node_id}",
                port,
                properties=properties,
                node_id=node_id,
                quorum=quorum,
            )
            for node_id, port in enumerate(ports, start=1)
        )
        """All brokers in the order of their node ids."""

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT` of each broker, separated by commas."""
        return ",".join(broker.bootstrap for broker in self.brokers)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _CLUSTER_TIMEOUT_S
        try:
            with ThreadPoolExecutor(len(self.brokers)) as pool:
                list(pool.map(lambda broker: broker.start(_CLUSTER_TIMEOUT_S), self.brokers))
            everyone = {broker.settings.node_id for broker in self.brokers}
            for broker in self.brokers:
                while broker.nodes() != everyone:
                    if time.monotonic() > deadline:
                        what = f"The brokers do not find one another in {_CLUSTER_TIMEOUT_S:g} s."
                        raise BrokerError(what, f"Read the logs, {broker.log_file} and beside it.")
                    broker.wait(_POLL_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for broker in reversed(self.brokers):  # the controller last: the others take leave of it
            broker.stop()


def _format_storage(java: Sequence[str], settings: BrokerSettings, settings_file: Path) -> None:
    """Format the storage unless that is done; `java` is the command up to the main class.

    Kafka formats the first one of a process with these users and properties. What it writes for the
    next one differs in the ids alone, and is written here: its tool takes as long as half a start.
    """
    # Kafka writes this file last, so a storage without it is formatted only in part.
    meta, checkpoint = (settings.storage_dir / name for name in (_META_FILE, _CHECKPOINT_FILE))
    if meta.exists():
        return
    given = frozenset((*settings.sasl_users.items(), *settings.properties.items()))
    if given in _checkpoints:
        settings.storage_dir.mkdir(exist_ok=True)
        checkpoint.write_bytes(_checkpoints[given])
        meta.write_text(settings.meta_text(), encoding="ascii")
        return
    command = [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted"]
    command += ["-t", settings.quorum.cluster_id, "-c", str(settings_file)]
    for name, password in settings.sasl_users.items():
        command += ["--add-scram", f"SCRAM-SHA-256=[name={name},password={password}]"]
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_FORMAT_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        what = f"Formatting the storage in {settings.storage_dir} took over {error.timeout:g} s."
        raise BrokerError(what, "Start it again when the machine is less loaded.") from error
    except subprocess.CalledProcessError as error:
        what = f"The storage in {settings.storage_dir} can't be formatted:\n{error.stdout.strip()}"
        how = "Choose another folder, or mend the server properties that you gave."
        raise BrokerError(what, how) from error
    if checkpoint.exists():  # not where properties name another folder
        _checkpoints[given] = checkpoint.read_bytes()
