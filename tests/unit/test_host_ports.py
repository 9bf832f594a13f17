"""Which member of a host has which port."""

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme
import yaml

from examples.devkit.loopback import free_ports
from proxy.config import Config, load_config
from proxy.config.check_report import find_hints
from proxy.config.endpoints import PortRange
from proxy.config.models import MAX_WORKERS
from proxy.host_ports import HostMemberSockets
from proxy.quota.rules import RuleTable
from proxy.relay.listener import SNI_PORT
from proxy.relay.ports import ListenerError

HOST = "127.0.0.1"
SNI = "b-{node_id}.kafka.example"


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., Config]:
    """`configured(workers, **changes of the listener)` loads a configuration."""

    def load(workers: int | str, admin_port: int = 0, **listener: object) -> Config:
        section = {"name": "main", "bind": f"{HOST}:0", "advertised_host": "proxy.example"}
        document = {
            "cluster": {"bootstrap_servers": ["broker-1:9092"]},
            "listeners": [{**section, **listener}],
            "workers": workers,
            "state": {"kind": "kafka", "topic": "state"},
            "tier": {"name": "tier", "machine": "machine"},
            "admin": {"bind": f"{HOST}:{admin_port}"},
        }
        file = tmp_path / "proxy.yaml"
        file.write_text(yaml.safe_dump(document))
        return load_config(file)

    return load


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, str]:
    server = trustme.CA().issue_cert("kafka.example")
    server.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    server.private_key_pem.write_to_path(tmp_path / "server.key")
    return {"cert_file": "server.pem", "key_file": "server.key", "sni": SNI}


@pytest.fixture
def opened() -> Iterator[Callable[[Config], HostMemberSockets]]:
    machines: list[HostMemberSockets] = []

    def open_ports(config: Config) -> HostMemberSockets:
        machines.append(HostMemberSockets(config))
        machines[-1].open_all()
        return machines[-1]

    yield open_ports
    for machine in machines:
        machine.close()


def free_range(count: int) -> tuple[int, int]:
    ports = free_ports(count)
    return ports[0], ports[-1]


def test_ports_are_cut_into_equal_parts():
    ports = PortRange(100, 110)
    parts = [ports.share(3, number) for number in range(3)]
    assert parts == [PortRange(100, 102), PortRange(103, 105), PortRange(106, 108)]
    assert PortRange(0, 0).share(3, 1) == PortRange(0, 0)


def test_auto_is_what_the_process_may_use():
    assert 1 <= Config.model_construct(workers="auto").worker_count <= MAX_WORKERS


def test_each_worker_has_its_sockets(configured, opened):
    first, last = free_range(4)
    machine = opened(configured(2, broker_ports=f"{first}-{last}"))
    ports = [
        {node: sock.getsockname()[1] for node, sock in member.listeners["main"].items()}
        for member in machine.members
    ]
    bootstrap = ports[0][None]
    assert ports == [
        {None: bootstrap, 0: first, 1: first + 1},
        {None: bootstrap, 0: first + 2, 1: first + 3},
    ]
    assert Counter(machine.addresses())[HOST, bootstrap] == 2


def test_with_names_each_worker_has_one_port_for_all_brokers(configured, opened, tls):
    first, last = free_range(3)
    machine = opened(configured(2, broker_ports=f"{first}-{last}", tls=tls))
    for number in range(2):
        sockets = machine.members[number].listeners["main"]
        assert set(sockets) == {None, SNI_PORT}
        assert sockets[SNI_PORT].getsockname()[1] == first + number


def test_members_share_one_admin_port_and_have_one_each(configured, opened):
    machine = opened(configured(3, broker_ports=0))
    shared = {sock.getsockname() for member in machine.members for sock in member.shared_admin}
    own = [sock.getsockname() for member in machine.members for sock in member.own_admin]
    assert [host for host, _ in shared] == [HOST]
    assert len({*own, *shared}) == 4


def test_a_port_that_is_taken_leaves_none_open(configured):
    first, last = free_range(4)
    with socket.socket() as taken:
        taken.bind((HOST, last))
        taken.listen()
        machine = HostMemberSockets(configured(2, broker_ports=f"{first}-{last}"))
        with pytest.raises(ListenerError, match=str(last)):
            machine.open_all()
    with socket.socket() as probe:
        probe.bind((HOST, first))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_admin_port_that_is_taken_leaves_none_open(configured, workers):
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        machine = HostMemberSockets(configured(workers, port, broker_ports=0))
        with pytest.raises(ListenerError, match=rf"admin.bind: {HOST}:{port}: .* in use"):
            machine.open_all()
    assert not list(machine.sockets())


@pytest.mark.parametrize(
    ("workers", "ports", "hint"),
    [
        (1, "19100-19109", None),
        (
            2,
            "19100-19109",
            "workers: 2, listener main: each worker has 5 ports (19100-19104, 19105-19109), for "
            "brokers with ids 0 to 4; fix, if there are others: widen broker_ports",
        ),
        (
            4,
            "19100-19107",
            "workers: 4, listener main: each worker has 2 ports (19100-19101, 19102-19103, "
            "19104-19105, ...), for brokers with ids 0 to 1; fix, if there are others: widen "
            "broker_ports",
        ),
        (2, 0, "workers: 2, listener main: each worker takes any free port for each broker"),
    ],
)
def test_a_check_says_how_ports_are_shared(configured, workers, ports, hint):
    config = configured(workers, broker_ports=ports)
    table = RuleTable(config.quota_settings.rules, enforce=True)
    hints = [line for line in find_hints(config, table) if line.startswith("workers")]
    assert hints == ([hint] if hint else [])
