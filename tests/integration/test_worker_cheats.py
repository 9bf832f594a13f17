"""Clients that go to all workers at once, whatever these say: none gets more than its bound."""

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trustme
from support.cheating import (
    ANSWER_BYTES,
    BOUND_BYTES,
    FETCH_VERSION,
    SPAN_S,
    cheat,
    check_bound,
    plain,
)
from support.machine import broker_ports, machine_config, until_settled
from support.operating import running
from support.proxy_process import HOST, ProxyProcess
from support.raw import RawClient, fetch, message

from examples.devkit.broker import EmbeddedBroker
from proxy.wire.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE

WORKERS = 3
MANY = 12
SHORT_S = 0.5


@pytest.fixture(scope="module")
def machine(
    kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProxyProcess]:
    rules = [{"client-id": f"cheat-{n}", "consumer_byte_rate": BOUND_BYTES} for n in range(9)]
    folder = tmp_path_factory.mktemp("cheats")
    process = ProxyProcess(machine_config(kafka.bootstrap, WORKERS, rules=rules), folder)
    with running(process):
        until_settled(process, WORKERS)
        yield process


@pytest.fixture
def full(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    name = topic()
    fill(name, 1, ANSWER_BYTES)
    return name


def test_who_reads_from_all_workers_at_once(machine: ProxyProcess, full: str) -> None:
    addresses = [*broker_ports(machine, WORKERS), machine.bootstrap, machine.bootstrap]
    before = machine.metrics().value("steered_connections_total")
    got = cheat(plain("cheat-0"), addresses, full)
    check_bound(got)
    revoke = machine.metrics().value("steered_connections_total") - before
    assert 0 < revoke <= len(addresses) * (got.seconds + 1), "each second at most"
    assert got.connections <= len(addresses) * (got.seconds + 2)


def test_who_connects_anew_for_each_answer(machine: ProxyProcess, full: str) -> None:
    addresses = [*broker_ports(machine, WORKERS), machine.bootstrap]
    check_bound(cheat(plain("cheat-1"), addresses, full, at_most=1))


def test_who_reads_over_many_bootstrap_connections(machine: ProxyProcess, full: str) -> None:
    check_bound(cheat(plain("cheat-2"), [machine.bootstrap], full, threads=9))


def test_who_was_quiet_at_all_workers_for_a_while(machine: ProxyProcess, full: str) -> None:
    """All have a sensor of it by then, which has seen nothing for longer than it looks back."""
    addresses = broker_ports(machine, WORKERS)
    for address in addresses:
        # Who does not own it gives it nothing, and lets it go.
        with plain("cheat-4")(address) as client, suppress(OSError):
            client.ask(fetch(FETCH_VERSION, full, max_bytes=1))
    time.sleep(3 * SPAN_S)
    check_bound(cheat(plain("cheat-4"), addresses, full, seconds=SHORT_S))


@pytest.mark.slow
def test_twelve_members_give_one_burst(kafka: EmbeddedBroker, full: str, tmp_path: Path) -> None:
    """A client whose first requests come at all of them at once, and again after a rest."""
    rules = [{"client-id": "bursts", "consumer_byte_rate": BOUND_BYTES}]
    with running(
        ProxyProcess(machine_config(kafka.bootstrap, MANY, rules=rules), tmp_path)
    ) as all_:
        until_settled(all_, MANY)
        addresses = broker_ports(all_, MANY)
        for _ in range(2):
            got = cheat(plain("bursts"), addresses, full, threads=4, at_most=5, seconds=SHORT_S)
            check_bound(got)
            time.sleep(3 * SPAN_S)


def test_who_closes_before_it_has_its_answers(machine: ProxyProcess, full: str) -> None:
    """What was asked for is charged all the same, to the owner, too."""
    addresses = [*broker_ports(machine, WORKERS), machine.bootstrap]
    check_bound(cheat(plain("cheat-3"), addresses, full, threads=2, at_most=2))


def test_a_user_who_logs_in_at_all_workers(
    kafka: EmbeddedBroker,
    full: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    rules = [{"user": "alice", "consumer_byte_rate": BOUND_BYTES}]
    settings = machine_config(kafka.sasl_bootstrap, WORKERS, rules=rules)
    folder = tmp_path_factory.mktemp("users")
    (folder / "password").write_text("bob.secret")
    settings["cluster"]["sasl"] = {
        "mechanism": "PLAIN",
        "username": "bob",
        "password_file": str(folder / "password"),
    }
    running = ProxyProcess(settings, folder).start()

    def connect(address: str) -> RawClient:
        client = RawClient(address, f"c{time.monotonic_ns()}")  # which counts for nothing
        client.ask(message(SASL_HANDSHAKE, 1, mechanism="PLAIN"))
        answer = client.ask(message(SASL_AUTHENTICATE, 1, auth_bytes=b"\0alice\0alice-secret"))
        assert answer.error_code == 0
        return client

    try:
        until_settled(running, WORKERS)
        check_bound(cheat(connect, [*broker_ports(running, WORKERS), running.bootstrap], full))
        running.stop()
    finally:
        running.kill()


def test_a_certificate_at_all_workers(
    kafka: EmbeddedBroker,
    full: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    names = {}
    for name, issued in (
        ("server", authority.issue_cert(HOST)),
        ("client", authority.issue_cert("etl@example", common_name="etl")),
    ):
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(cert))
        issued.private_key_pem.write_to_path(str(key))
        names[name] = {"cert_file": str(cert), "key_file": str(key)}
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    rules = [{"user": "<default>", "consumer_byte_rate": BOUND_BYTES}]
    settings = machine_config(kafka.bootstrap, WORKERS, rules=rules)
    settings["listeners"][0]["tls"] = {
        **names["server"],
        "ca_file": str(folder / "ca.pem"),
    }
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(names["client"]["cert_file"], names["client"]["key_file"])
    running = ProxyProcess(settings, folder / "proxy").start()
    try:
        until_settled(running, WORKERS)
        addresses = [*broker_ports(running, WORKERS), running.bootstrap]
        got = cheat(lambda address: RawClient(address, "any", tls=context), addresses, full)
        check_bound(got)
        running.stop()
    finally:
        running.kill()
