"""The configuration: what loads, to which values, and every mistake with its full message.

The mistakes are cases in `config_errors.txt`, to be read like a page of a manual.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import pytest
import trustme
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.config import (
    BadValueError,
    Config,
    ConfigError,
    ConfigProblem,
    HostPort,
    PortRange,
    format_duration,
    format_size,
    load_config,
    parse_duration,
    parse_size,
)
from proxy.config.endpoints import parse_bind, parse_broker_ports
from proxy.config.units import (
    DURATION_UNITS,
    MAX_DURATION_S,
    MAX_SIZE_BYTES,
    SIZE_UNITS,
    parse_duration_or_zero,
)

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
MIB = 2**20

MINIMAL = """\
cluster: {bootstrap_servers: [broker-1:9092]}
listeners:
  - {name: a, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the cases name."""
    path = tmp_path_factory.mktemp("config")
    authority = trustme.CA()
    server, other = authority.issue_cert("localhost"), authority.issue_cert("other")
    authority.cert_pem.write_to_path(path / "ca.pem")
    server.cert_chain_pems[0].write_to_path(path / "server.pem")
    server.private_key_pem.write_to_path(path / "server.key")
    other.private_key_pem.write_to_path(path / "other.key")
    for name, kind in (("encrypted.key", "ENCRYPTED PRIVATE KEY"), ("damaged.key", "PRIVATE KEY")):
        (path / name).write_text(f"-----BEGIN {kind}-----\nAAAA\n-----END {kind}-----\n")
    (path / "empty").write_text("\n")
    (path / "garbage").write_text("no PEM")
    (path / "token").write_text("secret\n")
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")
    return path


@pytest.fixture
def load(folder: Path) -> Callable[[str | bytes], Config]:
    """Write a configuration file beside the others and load it."""

    def write_and_load(content: str | bytes) -> Config:
        path = folder / "config.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_config(path)

    return write_and_load


def error_cases() -> Iterator[object]:
    _, *cases = (HERE / "config_errors.txt").read_text().split("=== ")
    for case in cases:
        name, rest = case.split("\n", 1)
        content, message = rest.split("-----\n", 1)
        yield pytest.param(content, message.strip(), id=name)


EMPTY = (
    "config.yaml: is empty\n"
    "    fix: write at least the sections cluster and listeners; see examples/minimal.yaml"
)
NESTED = (
    "config.yaml: nests too deeply, or an alias (*name) contains itself\n    fix: write it flatter"
)
NOT_UTF8 = "config.yaml:2: is not UTF-8: byte 0xff\n    fix: save the file as UTF-8"
CONTROL = "config.yaml:3: holds the control character U+0007\n    fix: remove it"
TAB = (
    "config.yaml:2: is not valid YAML at column 1: while scanning for the next token, found "
    "character '\\t' that cannot start any token\n"
    "    fix: use spaces, YAML does not allow tabs here"
)
UNPRINTABLE_CASES = [
    pytest.param(b"", EMPTY, id="an empty file"),
    pytest.param(b"# only\n\n# comments\n", EMPTY, id="only comments"),
    pytest.param(b"cluster:\n  x: \xff\n", NOT_UTF8, id="not UTF-8"),
    pytest.param(b"cluster:\n\n  x: \x07\n", CONTROL, id="a control character"),
    pytest.param(b"cluster:\n\tx: y\n", TAB, id="a tab"),
    pytest.param(b"[" * 5000, NESTED, id="too deep"),
]


@pytest.mark.parametrize(("content", "message"), [*error_cases(), *UNPRINTABLE_CASES])
def test_a_mistake_is_told_in_full(
    content: str | bytes, message: str, folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(content)
    assert str(caught.value).replace(f"{folder}{os.sep}", "") == message


def test_an_error_carries_its_problems_as_data(
    folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(MINIMAL + "throttle: {mode: drop}\nlimit: {}\n")
    file = str(folder / "config.yaml")
    assert caught.value.problems == (
        ConfigProblem(file, 4, "throttle.mode", '"drop" is not known here', "write delay or mute"),
        ConfigProblem(file, 5, "limit", "is not a known key", "did you mean limits?"),
    )


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("absent.yaml", "does not exist", "create it or correct its path"),
        ("token/config.yaml", "does not exist", "create it or correct its path"),
        ("folder", "is a directory", "name a file"),
        ("loop", "cannot be read: Too many levels of symbolic links", "correct its path"),
    ],
)
def test_a_file_that_cannot_be_read(name: str, message: str, fix: str, folder: Path) -> None:
    path = folder / name
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value) == f'{path}: "{path}" {message}\n    fix: {fix}'


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_files_without_permission(folder: Path, load: Callable[[str | bytes], Config]) -> None:
    secret, locked = folder / "secret", folder / "locked"
    secret.touch(mode=0)
    locked.mkdir(mode=0o500, exist_ok=True)
    with pytest.raises(ConfigError) as caught:
        load(MINIMAL + "state: {path: locked/x.db}\nadmin: {token_file: secret}\n")
    assert [problem.message for problem in caught.value.problems] == [
        f'"{locked}/x.db" may not be written by this user',
        f'"{secret}" may not be read by this user',
    ]


def test_defaults(folder: Path, load: Callable[[str | bytes], Config]) -> None:
    config = load(MINIMAL)
    assert config.cluster.bootstrap_servers == (HostPort("broker-1", 9092),)
    assert config.cluster.tls is None
    assert config.listeners[0].tls is None
    assert config.quotas.model_dump() == {
        "source": "file",
        "window": 1.0,
        "samples": 11,
        "rules": (),
    }
    assert config.throttle.model_dump() == {"mode": "delay", "max_delay": 20.0}
    assert config.limits.model_dump() == {
        "max_connections": 10_000,
        "max_connections_per_ip": 1_000,
        "max_request_bytes": 100 * MIB,
        "max_in_flight_requests": 64,
        "idle_timeout": 600.0,
        "connect_timeout": 10.0,
        "drain_timeout": 10.0,
        "max_client_entities": 10_000,
    }
    assert config.state.model_dump() == {"kind": "sqlite", "path": folder / "quota-proxy.db"}
    assert config.admin.bind == HostPort("127.0.0.1", 9644)
    assert config.admin.token_file is None


DESIGN_EXAMPLE = """\
cluster:
  bootstrap_servers: [broker-1:9092, broker-2:9092]
  tls: {ca_file: ca.pem, cert_file: server.pem, key_file: server.key}        # optional
listeners:
  - name: default
    bind: 0.0.0.0:19092            # bootstrap
    advertised_host: localhost     # what clients are told
    broker_ports: 19100-19199      # broker N is first port + N
    tls: {cert_file: server.pem, key_file: server.key, sni: "broker-{node_id}.kafka.example"}
  - {name: tenants, bind: 0.0.0.0:19093, advertised_host: localhost, broker_ports: 19200-19299}
quotas:
  window: 1s
  samples: 11
  rules:
    - {client-id: etl-orders, consumer_byte_rate: 10MiB, producer_byte_rate: 5MiB}
    - {client-id-prefix: consumer-reports-, scope: shared, consumer_byte_rate: 20MiB}
    - {user: alice, client-id: <default>, consumer_byte_rate: 2MiB}
    - {listener: tenants, consumer_byte_rate: 50MiB}
    - {client-id: <default>, consumer_byte_rate: 50MiB, request_percentage: 50}
throttle: {mode: delay, max_delay: 20s}
limits: {max_connections: 10000, max_connections_per_ip: 1000, max_request_bytes: 100MiB,
  max_in_flight_requests: 64, idle_timeout: 10m, max_client_entities: 10000}
state: {kind: sqlite, path: quota-proxy.db}       # memory | sqlite | kafka
admin: {bind: 127.0.0.1:9644, token_file: token}
"""


def test_a_full_example(folder: Path, load: Callable[[str | bytes], Config]) -> None:
    config = load(DESIGN_EXAMPLE)
    assert config.cluster.tls is not None
    assert config.cluster.tls.ca_file == folder / "ca.pem"
    assert config.listeners[0].tls is not None
    assert config.listeners[0].tls.sni == "broker-{node_id}.kafka.example"
    assert config.listeners[0].broker_ports == PortRange(19100, 19199)
    first, prefix, alice, tenants, default = config.quotas.rules
    assert (first.client_id, first.scope) == ("etl-orders", "each")
    assert (first.consumer_byte_rate, first.producer_byte_rate) == (10 * MIB, 5 * MIB)
    assert (prefix.client_id_prefix, prefix.scope) == ("consumer-reports-", "shared")
    assert (alice.user, alice.client_id) == ("alice", "<default>")
    assert (tenants.listener, tenants.client_id) == ("tenants", None)
    assert default.request_percentage == 50.0
    assert config.admin.token_file == folder / "token"
    assert config.place("quotas.rules[1]") == f"{folder / 'config.yaml'}:16"
    assert config.place("state.kind") == f"{folder / 'config.yaml'}:23"
    assert config.place("limits.drain_timeout") == ""


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_load(example: Path, load: Callable[[str | bytes], Config]) -> None:
    assert load(example.read_text()).quotas.rules


def test_what_the_full_example_comments_out_loads_too(
    folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    text = (EXAMPLES / "quota-proxy.yaml").read_text()
    copies = {"cluster-ca.pem": "ca.pem", "clients-ca.pem": "ca.pem", "proxy.pem": "server.pem"}
    copies |= {"proxy.key": "server.key", "admin-token": "token"}
    for name, source in copies.items():
        shutil.copy(folder / source, folder / name)
    text, uncommented = re.subn(r"(?m)^( *)# (tls|token_file): ", r"\1\2: ", text)
    config = load(text)
    assert uncommented == 3
    assert config.cluster.tls is not None
    assert config.listeners[1].tls is not None
    assert config.admin.token_file == folder / "admin-token"


GOOD = [
    ("a byte order mark", "\ufeff" + MINIMAL),
    ("an anchor", MINIMAL + "throttle: {max_delay: &t 5s}\nlimits: {idle_timeout: *t}\n"),
    ("a date as a client id", MINIMAL + "quotas: {rules: [{client-id: 2024-02-31, "
     "consumer_byte_rate: 1}]}\n"),
    ("the quotas of one client by kind of key", MINIMAL + "quotas: {rules: [{client-id: a, "
     "consumer_byte_rate: 1}, {client-id-prefix: a, consumer_byte_rate: 1}, {user: a, "
     "consumer_byte_rate: 1}, {user: a, client-id: a, consumer_byte_rate: 1}]}\n"),
    ("free ports twice", MINIMAL.replace("19092", "0").replace("19100-19199", "0")
     + "  - {name: b, bind: 127.0.0.1:0, advertised_host: h, broker_ports: 0}\n"),
    ("the same ports on other addresses", MINIMAL + "  - {name: b, bind: '[::]:19092', "
     "advertised_host: h, broker_ports: 19100-19199}\n"
     "  - {name: c, bind: 127.0.0.2:19092, advertised_host: '::1', broker_ports: 19100-19199}\n"),
    ("one port by server name", MINIMAL.replace("broker_ports: 19100-19199", "tls: {cert_file: "
     "server.pem, key_file: server.key, ca_file: ca.pem, sni: 'b{node_id}.example'}")),
    ("the system's authorities", MINIMAL.replace("9092]}", "9092], tls: {}}")),
    ("an open admin server with a token", MINIMAL + "admin: {bind: 0.0.0.0:9644, "
     "token_file: token}\n"),
    ("an admin server on IPv6 loopback", MINIMAL + "admin: {bind: '[::1]:9644'}\n"),
    ("no drain", MINIMAL + "limits: {drain_timeout: 0}\n"),
    ("nothing kept", MINIMAL + "state: {kind: memory}\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), GOOD, ids=[name for name, _ in GOOD])
def test_good_configurations(
    name: str, content: str, load: Callable[[str | bytes], Config]
) -> None:
    assert load(content).listeners


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [(1, 1), ("7", 7), ("1kB", 1000), ("1KiB", 1024), ("1.5MiB", 1572864), ("0.0015kB", 2)],
)
def test_sizes(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@given(st.integers(1, MAX_SIZE_BYTES))
def test_a_size_survives_being_written(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.integers(1, 10**6), st.sampled_from(sorted(SIZE_UNITS)))
def test_a_size_with_unit_survives_being_read(number: int, unit: str) -> None:
    size_bytes = parse_size(f"{number}{unit}")
    assert size_bytes == number * SIZE_UNITS[unit]
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.floats(0, float(MAX_DURATION_S)))
def test_a_duration_survives_being_written(seconds: float) -> None:
    assert parse_duration_or_zero(format_duration(seconds)) == seconds


@given(st.integers(1, 8000), st.sampled_from(sorted(DURATION_UNITS)))
def test_a_duration_with_unit_survives_being_read(number: int, unit: str) -> None:
    seconds = parse_duration(f"{number}{unit}")
    assert Decimal(repr(seconds)) == number * DURATION_UNITS[unit]
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.one_of(st.text(), st.from_regex(r"[0-9.:\[\]-]+[a-zA-Z ]*", fullmatch=True)))
@pytest.mark.parametrize("parse", [parse_size, parse_duration, parse_bind, parse_broker_ports])
def test_no_text_breaks_a_parser(parse: Callable[[object], object], text: str) -> None:
    with contextlib.suppress(BadValueError):
        parse(text)


@pytest.mark.parametrize(
    "text", ["broker-1:9092", "[::1]:9092", "[fe80::1%eth0]:1", "10.0.0.1:0", "a_b.c.:65535"]
)
def test_an_endpoint_survives_being_read(text: str) -> None:
    assert str(parse_bind(text)) == text


@given(st.integers(1, 65535), st.integers(1, 65535), st.integers(-1, 70000))
def test_broker_ports(first: int, last: int, node_id: int) -> None:
    assume(first <= last)
    ports = parse_broker_ports(f"{first}-{last}")
    if first <= first + node_id <= last:
        assert ports.port_of(node_id) == first + node_id
    else:
        with pytest.raises(ValueError, match="has no port"):
            ports.port_of(node_id)


def test_free_broker_ports() -> None:
    ports = parse_broker_ports(0)
    assert (ports.any_free, ports.port_of(7), str(ports)) == (True, 0, "0")
