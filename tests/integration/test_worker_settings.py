"""What all workers must follow alike: names of brokers, certificates, quotas of the cluster."""

import json
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.kafka_configs import alter_quotas
from support.machine import (
    MACHINE,
    broker_ports,
    free_range,
    kill_worker,
    machine_config,
    until_replaced,
    until_settled,
)
from support.operating import hang_up, running, write
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, fetch, message

from examples.devkit.broker import EmbeddedBroker
from proxy.wire.apis import METADATA

WORKERS = 3
BROKER = 1
SNI = "broker-{node_id}.kafka.example"
CLIENTS = [f"c{number}" for number in range(12)]
MANY_RULES = 10_000
RELOAD_LIMIT_S = 300
AFTERWARDS_S = 4.0
"""By then all find clients' owners by the new rules."""
ANSWER_LIMIT_S = 60
"""For any request meanwhile; other processes may have the processors."""
NAMED = ("--entity-type", "clients", "--entity-name", "etl-of-workers")


def certificate(authority: trustme.CA, folder: Path, **more: Any) -> dict[str, str]:
    issued = authority.issue_cert(HOST, *(SNI.format(node_id=n) for n in (BROKER, 9)), **more)
    issued.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    issued.private_key_pem.write_to_path(str(folder / "tls.key"))
    return {"cert_file": str(folder / "tls.crt"), "key_file": str(folder / "tls.key")}


def test_brokers_by_name_and_another_certificate(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], tmp_path: Path
) -> None:
    name = topic()
    fill(name, 1, 100)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    settings = machine_config(kafka.bootstrap, WORKERS)
    ports = free_range(WORKERS)
    settings["listeners"][0] |= {
        "broker_ports": ports,
        "tls": {**certificate(authority, tmp_path, common_name="one"), "sni": SNI},
    }
    first = int(ports.partition("-")[0])
    own = [f"{HOST}:{first + number}" for number in range(WORKERS)]
    by_name = SNI.format(node_id=BROKER)

    def connect(address: str, client_id: str, server_name: str | None = None) -> RawClient:
        return RawClient(address, client_id, tls=context, server_name=server_name)

    def names_shown() -> set[str]:
        found = set()
        for address in own:
            with connect(address, "any", by_name) as client:
                assert isinstance(client.sock, ssl.SSLSocket)
                certified = client.sock.getpeercert()
                assert certified
                found.add(dict(each[0] for each in certified["subject"])["commonName"])
        return found

    with running(ProxyProcess(settings, tmp_path / "proxy")) as machine:
        until_settled(machine, WORKERS)
        owners = set()
        for client_id in CLIENTS:
            with connect(machine.bootstrap, client_id) as client:
                brokers = client.ask(message(METADATA, 1, topics=[])).brokers
            told = {each.node_id: (each.host, each.port) for each in brokers}
            assert told[BROKER][0] == by_name
            owners.add(told[BROKER][1])
            with connect(f"{HOST}:{told[BROKER][1]}", client_id, by_name) as client:
                (answer,) = client.ask(fetch(12, name)).responses
                assert answer.partitions[0].records
        assert owners == {first + number for number in range(WORKERS)}
        assert machine.metrics().value("steered_connections_total") == 0
        until_replaced(machine, 1, kill_worker(machine, 1))
        assert names_shown() == {"one"}
        certificate(authority, tmp_path, common_name="two")
        hang_up(machine)
        until(lambda: names_shown() == {"two"}, "all show it")
        until_replaced(machine, 2, kill_worker(machine, 2))
        assert names_shown() == {"two"}


@pytest.mark.slow
def test_all_follow_the_quotas_of_the_cluster(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    settings = machine_config(kafka.bootstrap, WORKERS, quotas={"source": "kafka"})

    def all_have(machine: ProxyProcess, bound: int | None) -> bool:
        for number in range(WORKERS):
            listed = json.loads(machine.get(f"/v1/quotas?member={MACHINE}/{number}")[1])["quotas"]
            bounds = [
                entry["bounds"].get("consumer_byte_rate")
                for entry in listed
                if "etl-of-workers" in json.dumps(entry)
            ]
            if bounds != ([] if bound is None else [bound]):
                return False
        return True

    try:
        with running(ProxyProcess(settings, tmp_path)) as machine:
            for bound in (1000, 2000):
                alter_quotas(kafka.bootstrap, f"+consumer_byte_rate={bound}", *NAMED)
                until(lambda bound=bound: all_have(machine, bound), f"all hold it to {bound}")
            until_replaced(machine, 1, kill_worker(machine, 1))
            until(lambda: all_have(machine, 2000), "the one that was started again, too")
    finally:
        alter_quotas(kafka.bootstrap, "-consumer_byte_rate", *NAMED)


@pytest.mark.slow
def test_many_rules_are_reloaded_while_clients_are_served(
    kafka: EmbeddedBroker, tmp_path: Path
) -> None:
    """Four workers and their launcher on what processors there are."""
    workers = 4

    def rules(bound: int) -> list[dict[str, Any]]:
        return [{"client-id": f"etl-{n}", "consumer_byte_rate": bound} for n in range(MANY_RULES)]

    settings = machine_config(kafka.bootstrap, workers, rules=rules(1000))
    with running(ProxyProcess(settings, tmp_path)) as machine:
        addresses = broker_ports(machine, workers)
        settings["quotas"]["rules"] = rules(2000)
        write(machine, settings)
        began_s, longest_s, took_s = time.monotonic(), 0.0, 0.0
        hang_up(machine)
        while not took_s or time.monotonic() < began_s + took_s + AFTERWARDS_S:
            for address in addresses:
                asked_s = time.monotonic()
                with RawClient(address, "etl-1") as client:
                    client.ask(message(METADATA, 1, topics=[]))
                longest_s = max(longest_s, time.monotonic() - asked_s)
            if not took_s and machine.log("configuration reloaded"):
                took_s = time.monotonic() - began_s
            assert time.monotonic() < began_s + RELOAD_LIMIT_S
        assert longest_s < ANSWER_LIMIT_S
        for number in range(workers):
            told = json.loads(machine.get(f"/v1/quotas?member={MACHINE}/{number}")[1])["quotas"]
            assert {each["bounds"]["consumer_byte_rate"] for each in told} == {2000}
