"""Runs some brokers as one cluster."""

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from proxy.devkit import BrokerError
from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.ivy import Progress
from proxy.devkit.ports import free_ports
from proxy.devkit.settings import Quorum, new_cluster_id

_POLL_S = 0.1


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
        controller_port, *ports = free_ports(count + 1)
        quorum = Quorum(new_cluster_id(), 1, controller_port)
        self.brokers = tuple(
            EmbeddedBroker(
                data_dir / f"broker-{node_id}",
                port,
                properties=properties,
                node_id=node_id,
                quorum=quorum,
                progress=progress,
            )
            for node_id, port in enumerate(ports, start=1)
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
            everyone = {broker.settings.node_id for broker in self.brokers}
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
