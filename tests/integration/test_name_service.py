"""Clients are served while names do not resolve, and nothing grows where one leads to the proxy."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.name_server import NAME, NameServer
from support.operating import quota_proxy, running
from support.proxy_process import HOST, LISTENER, ProxyProcess, config, until
from support.raw import RawClient, api_versions

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports

SERVER = f"{NAME}:9092"
CLIENTS = 20
FEW_FILES = 10
"""More than there were, for all that clients who are led to the proxy itself leave open."""


@pytest.fixture
def names(tmp_path: Path) -> NameServer:
    return NameServer(tmp_path)


@pytest.fixture
def named(names: NameServer, tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy that has no broker yet."""
    with running(ProxyProcess(config(SERVER), tmp_path / "proxy", changes=names.changes)) as it:
        yield it


def warning(process: ProxyProcess) -> str:
    """Return what /readyz says is wrong although clients are served; empty: it is not so."""
    status, text = process.get("/readyz")
    return str(json.loads(text).get("warning", "")) if status == 200 else ""


def serves(process: ProxyProcess) -> None:
    with RawClient(process.bootstrap, "raw") as client:
        client.ask(api_versions(3))


def open_files(process: ProxyProcess) -> int:
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir()))


@pytest.mark.parametrize("outage", ["fail", "fall_silent"])
def test_an_outage_of_the_name_service(
    named: ProxyProcess, names: NameServer, kafka: EmbeddedBroker, outage: str
) -> None:
    names.means(HOST, kafka.port)
    until(lambda: named.get("/readyz")[0] == 200, "the cluster is there")
    serves(named)
    getattr(names, outage)()
    for _ in range(3):
        serves(named)
    assert NAME in until(lambda: warning(named), "a warning")
    assert "last good addresses" in warning(named)
    (line,) = named.log("a name does not resolve, its last addresses serve")
    assert line["name"] == NAME
    if outage == "fail":
        names.means(HOST, kafka.port)
        serves(named)
        assert warning(named) == ""


def test_a_bootstrap_server_that_is_the_proxy_itself(
    named: ProxyProcess, names: NameServer, kafka: EmbeddedBroker
) -> None:
    before = open_files(named)
    names.means(HOST, named.port)
    for _ in range(CLIENTS):
        with RawClient(named.bootstrap, "raw") as client, pytest.raises(ConnectionError):
            client.ask(api_versions(3))
        assert open_files(named) <= before + FEW_FILES
    until(lambda: "proxy itself" in named.get("/readyz")[1], "it says so")
    status, text = named.get("/readyz")
    assert status == 503
    assert f"{SERVER} is this proxy itself; fix: " in text
    assert named.metrics().value("upstream_errors_total", reason="loop") >= CLIENTS
    names.means(HOST, kafka.port)
    until(lambda: named.get("/readyz")[0] == 200, "the cluster is there")
    serves(named)
    assert warning(named) == ""


@pytest.mark.parametrize(
    ("bind", "server"),
    [
        (HOST, HOST),
        (HOST, "localhost"),
        ("0.0.0.0", HOST),
        ("broker-1.example", "broker-1.example"),
    ],
)
@pytest.mark.parametrize("which", ["bootstrap", "broker"])
@pytest.mark.parametrize("command", ["run", "check"])
def test_a_configuration_that_leads_to_the_proxy_itself(
    tmp_path: Path, bind: str, server: str, which: str, command: str
) -> None:
    first, second = free_ports(2)
    listener = LISTENER | {"bind": f"{bind}:{first}", "broker_ports": f"{second}-{second}"}
    document = config(f"other.example:1,{server}:{first if which == 'bootstrap' else second}")
    file = tmp_path / "proxy.yaml"
    file.write_text(json.dumps(document | {"listeners": [listener]}))
    code, _, err = quota_proxy(command, "-c", file)
    assert code == 2
    assert "cluster.bootstrap_servers[1]" in err
    assert 'of listener "default", is this proxy itself' in err
    assert "fix: " in err


@pytest.mark.parametrize(("port", "is_told"), [(9092, True), (9192, True), (9093, False)])
def test_a_name_by_which_clients_find_the_proxy(tmp_path: Path, port: int, is_told: bool) -> None:
    own = {"bind": "0.0.0.0:9092", "advertised_host": "kafka.example", "broker_ports": "9192-9193"}
    document = config(f"kafka.example:{port}") | {"listeners": [LISTENER | own]}
    file = tmp_path / "proxy.yaml"
    file.write_text(json.dumps(document))
    code, out, _ = quota_proxy("check", "-c", file)
    assert code == 0
    hint = f"kafka.example:{port} is where clients find listener default; fix"
    assert (hint in out) is is_told
