"""Says how one broker is set up, as a value and as the properties file that Kafka reads."""

import base64
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.devkit.loopback import HOST

_NAME = re.compile(r"[A-Za-z0-9._-]+")

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
    # A killed broker is taken back when its last session is over: 9 s by default.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    "group.initial.rebalance.delay.ms": "0",
    # The default writes a record twice a second, for followers, into a log that else rests.
    "metadata.max.idle.interval.ms": "0",
    # The default takes 128 MiB of the heap.
    "log.cleaner.dedupe.buffer.size": "4194304",
}


@dataclass(frozen=True, slots=True)
class Quorum:
    """The controller that the brokers of one cluster share; `port` is its own, not a client's."""

    cluster_id: str
    controller_id: int
    port: int


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """How one broker is set up; ValueError when a SASL user can't be written into a file."""

    node_id: int
    quorum: Quorum
    port: int
    """Of the plaintext listener."""
    sasl_port: int | None
    """Of the SASL listener; None for no such listener."""
    sasl_users: Mapping[str, str]
    """Passwords by name, both of `A-Z a-z 0-9 . _ -`."""
    storage_dir: Path
    properties: Mapping[str, str]
    """Kafka's server properties; they win over all others."""

    def __post_init__(self) -> None:
        if not all(map(_NAME.fullmatch, (*self.sasl_users, *self.sasl_users.values()))):
            raise ValueError("SASL user names and passwords are made of A-Z a-z 0-9 . _ -")

    @property
    def ports(self) -> tuple[int, ...]:
        """All ports that the broker listens on."""
        ports = self.port, self.sasl_port, self.quorum.port if self._is_controller else None
        return tuple(port for port in ports if port is not None)

    def file_text(self) -> str:
        """Return the content of Kafka's `server.properties`, in ASCII."""
        listeners = [f"PLAINTEXT://{HOST}:{self.port}"]
        values = {
            **_PROPERTIES,
            "node.id": str(self.node_id),
            "log.dirs": str(self.storage_dir),
            "controller.quorum.voters": f"{self.quorum.controller_id}@{HOST}:{self.quorum.port}",
        }
        if self.sasl_port is not None:
            listeners.append(f"SASL_PLAINTEXT://{HOST}:{self.sasl_port}")
            prefix = "listener.name.sasl_plaintext"
            module = "org.apache.kafka.common.security"
            logins = " ".join(f'user_{name}="{word}"' for name, word in self.sasl_users.items())
            plain, scram = f"{module}.plain.PlainLoginModule", f"{module}.scram.ScramLoginModule"
            values |= {
                f"{prefix}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
                f"{prefix}.plain.sasl.jaas.config": f"{plain} required {logins};",
                f"{prefix}.scram-sha-256.sasl.jaas.config": f"{scram} required;",
            }
        values["advertised.listeners"] = ",".join(listeners)
        values["process.roles"] = "broker"
        if self._is_controller:
            values["process.roles"] = "broker,controller"
            listeners.append(f"CONTROLLER://{HOST}:{self.quorum.port}")
        values["listeners"] = ",".join(listeners)
        values |= self.properties
        # Within a line, JSON's escapes are those of a Java properties file.
        return "".join(f"{key}={json.dumps(value)[1:-1]}\n" for key, value in values.items())

    def meta_text(self) -> str:
        """Return the content of `meta.properties` for a new storage, with a random id of it."""
        ids = {"cluster.id": self.quorum.cluster_id, "directory.id": new_cluster_id()}
        values = {"version": "1", "node.id": str(self.node_id), **ids}
        return "".join(f"{key}={value}\n" for key, value in values.items())

    @property
    def _is_controller(self) -> bool:
        return self.quorum.controller_id == self.node_id


def new_cluster_id() -> str:
    """Return a random UUID in URL-safe base64, as Kafka wants it; it begins as no option does.

    Good as the id of a storage, too.
    """
    return "K" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:].rstrip("=")
