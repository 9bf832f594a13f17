"""Brokers that are down or come back, a proxy that is killed, and one that is asked to stop."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from support.clients import CLIENTS, Access, Client, Librdkafka, Read
from support.operating import running
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, api_versions, fetch

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.health import SILENCE_GRACE_S

SLOW_BOUND_BYTES = 50_000
RECORD_BYTES = 500_000
WAIT_FOR_BROKER_S = 60


def test_answers_in_flight_go_out_when_it_stops(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    """A fetch that is held for ten seconds comes at once, whole, and then the proxy ends."""
    running = proxy(rules=[{"client-id": "held", "consumer_byte_rate": SLOW_BOUND_BYTES}])
    name = topic()
    fill(name, 1, RECORD_BYTES)
    with RawClient(running.bootstrap, "held") as client, RawClient(running.bootstrap) as idle:
        idle.ask(api_versions(3))
        client.send(fetch(12, name))
        until(lambda: running.metrics().value("delay_queue_size", api="fetch") == 1, "it is held")
        running.terminate()
        (answer,) = client.receive().responses
        assert len(answer.partitions[0].records) > RECORD_BYTES
        assert client.is_closed_by_peer()
        assert idle.is_closed_by_peer()
        with pytest.raises(ConnectionRefusedError):
            RawClient(running.bootstrap)
        assert running.wait() == 0
    assert running.log("closing connections that did not drain") == []


def test_a_client_that_does_not_read_does_not_keep_it_from_stopping(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    running = proxy(limits={"drain_timeout": "300ms"})
    name = topic()
    fill(name, 10, RECORD_BYTES)
    with RawClient(running.bootstrap, receive_buffer_bytes=4096) as client:
        client.send(*[fetch(12, name, max_bytes=10 * RECORD_BYTES) for _ in range(8)])
        until(lambda: running.metrics().value("bytes_total", api="Fetch") > 0, "an answer is begun")
        running.terminate()
        assert running.wait() == 0
    assert len(running.log("closing connections that did not drain")) == 1


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A broker that a test may harm; it is not started."""
    broker = EmbeddedBroker(tmp_path / "broker", properties={"num.partitions": "2"})
    yield broker
    broker.stop()


def health(process: ProxyProcess) -> dict[str, float]:
    """Give what the metrics say of the proxy itself."""
    metrics = process.metrics()
    return {name: metrics.value(name) for name in ("ready", "cluster_reachable", "state_writable")}


@pytest.mark.slow
def test_broker_that_is_down_at_start(
    proxy: Callable[..., ProxyProcess], own_broker: EmbeddedBroker
) -> None:
    running = proxy(bootstrap_servers=own_broker.bootstrap)
    assert running.get("/healthz")[0] == 200
    status, text = running.get("/readyz")
    assert (status, "cluster" in text) == (503, True)
    assert health(running) == {"ready": 0, "cluster_reachable": 0, "state_writable": 1}
    with RawClient(running.bootstrap) as client:
        client.send(api_versions(3))
        assert client.is_closed_by_peer()
    running.until_counts("upstream_errors_total", 1, reason="refused")
    (line,) = running.logged("upstream failed")
    assert line["reason"] == "refused"

    own_broker.start()
    until(lambda: running.get("/readyz")[0] == 200, "ready by itself")
    with RawClient(running.bootstrap) as client:
        assert client.ask(api_versions(3)).error_code == 0
    assert health(running) == {"ready": 1, "cluster_reachable": 1, "state_writable": 1}
    own_broker.kill()
    until(lambda: not health(running)["cluster_reachable"], "it is noticed")
    assert json.loads(running.get("/readyz")[1])["warning"] == "the Kafka cluster does not answer"
    for _ in range(20):
        with RawClient(running.bootstrap) as client:
            client.send(api_versions(3))
            assert client.is_closed_by_peer()
    assert len(running.log("upstream failed")) <= 2, "one for each outage"


class Silenced(NamedTuple):
    """A proxy that was ready when its only broker was killed."""

    process: ProxyProcess
    answer: tuple[int, str]
    """Of `/readyz` when it had noticed."""
    health: dict[str, float]
    """At the same time."""


@pytest.fixture(scope="module")
def silenced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Silenced]:
    """Of the module: what comes of the silence takes SILENCE_GRACE_S, in which other tests run."""
    folder = tmp_path_factory.mktemp("silenced")
    with (
        EmbeddedBroker(folder / "broker") as broker,
        running(ProxyProcess(config(broker.bootstrap), folder / "proxy")) as process,
    ):
        until(lambda: process.get("/readyz")[0] == 200, "it is ready")
        broker.kill()
        until(lambda: not health(process)["cluster_reachable"], "it is noticed")
        yield Silenced(process, process.get("/readyz"), health(process))


@pytest.mark.slow
def test_a_cluster_that_falls_silent_is_warned_of(silenced: Silenced) -> None:
    status, text = silenced.answer
    assert (status, json.loads(text)["warning"]) == (200, "the Kafka cluster does not answer")
    assert silenced.health["ready"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["broker", "proxy"])
def test_clients_go_on_after_a_crash(
    own_broker: EmbeddedBroker, tmp_path: Path, victim: str
) -> None:
    """Each client reads the first half, then one end of its connection is killed."""
    own_broker.start()
    port, first, last = free_ports(3)
    listener = {
        "bind": f"{HOST}:{port}",
        "broker_ports": f"{first}-{last}",
    }
    running = ProxyProcess(config(own_broker.bootstrap, listeners=[listener]), tmp_path / "proxy")
    running.start()
    try:
        half = 200
        Librdkafka().produce(
            Access(running.bootstrap), "crash", [(n % 2, b"%08d" % n) for n in range(half)]
        )
        here = threading.Barrier(len(CLIENTS) + 1)
        crashed = threading.Event()

        def read(client: Client) -> Read:
            def halfway() -> None:
                here.wait(WAIT_FOR_BROKER_S)
                crashed.wait(WAIT_FOR_BROKER_S)

            access = Access(running.bootstrap, client.name)
            return client.consume(access, "crash", 2 * half, at=(half, halfway))

        with ThreadPoolExecutor() as pool:
            reads = [pool.submit(read, client) for client in CLIENTS]
            here.wait(WAIT_FOR_BROKER_S)
            if victim == "broker":
                own_broker.kill()
                own_broker.start()
                until(lambda: running.get("/readyz")[0] == 200, "ready again")
            else:
                running.kill()
                running.start()
            crashed.set()
            Librdkafka().produce(
                Access(running.bootstrap),
                "crash",
                [(n % 2, b"%08d" % n) for n in range(half, 2 * half)],
            )
            for client, task in zip(CLIENTS, reads, strict=True):
                values = [value for part in task.result().values.values() for value in part]
                assert {int(value) for value in values} == set(range(2 * half)), client.name
        running.stop()
    finally:
        running.kill()


@pytest.mark.slow
def test_clients_are_sent_away_from_a_cluster_that_stays_silent(silenced: Silenced) -> None:
    process = silenced.process
    until(lambda: process.get("/readyz")[0] == 503, "clients are sent away", 2 * SILENCE_GRACE_S)
    assert health(process)["ready"] == 0
