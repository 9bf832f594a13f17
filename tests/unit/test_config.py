"""The configuration: what loads, to which values, and every mistake with its full message.

The mistakes are cases in `config_errors.txt`, to be read like a page of a manual.
"""

import contextlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest
import trustme
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metrics.clock import MS_PER_SECOND
from proxy.config import Config, ConfigError, load_config
from proxy.config.document import ConfigProblem
from proxy.config.endpoints import HostPort, PortRange, parse_bind, parse_broker_ports
from proxy.config.files import find_exposed, read_bytes, read_password
from proxy.config.rule_models import AdaptiveSection
from proxy.config.secrets import PUBLIC_FILES, named_files
from proxy.pipeline.graph import (
    PendingLimit,
    PipelineGraph,
    PipelineSettings,
    SourceProducerSettings,
    StageSettings,
    find_shared_members,
)
from proxy.quota.fields import keys_of_section
from proxy.quota.values import (
    DURATION_UNITS,
    MAX_DURATION_S,
    MAX_NUMBER,
    MAX_SIZE_BYTES,
    SIZE_UNITS,
    BadValueError,
    format_ms,
    format_number,
    format_size,
    parse_duration,
    parse_duration_or_zero,
    parse_size,
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
def folder() -> Iterator[Path]:
    """A directory with the files that the cases name; its path is short, for messages show it."""
    with tempfile.TemporaryDirectory(prefix="kqp-", dir="/tmp") as path:
        _fill(Path(path))
        yield Path(path)


def _fill(path: Path) -> None:
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
    (path / "lines").write_text("secret\nmore\n")
    (path / "latin").write_bytes(b"\xfcber")
    (path / "more").write_text("another-token")
    (path / "folder").mkdir()
    (path / "loop").symlink_to("loop")


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
        content, message = rest.replace("[minimal]\n", MINIMAL).split("-----\n", 1)
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
MANY_DIGITS = (
    "config.yaml:4: limits.max_connections: a number of more than 60 digits is out of range\n"
    "    fix: write a whole number from 1 to 2147483647\n"
    "config.yaml:5: quotas.rules[0].request_percentage: a number of more than 60 digits is too "
    "large\n    fix: write at most 1000000000000"
)


def laughs(depth: int) -> str:
    """Name 9 to the power of `depth` values in a few lines."""
    lines = [f"  - &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]" for level in range(1, depth)]
    return "\n".join(["x:", "  - &l0 [y, y, y, y, y, y, y, y, y]", *lines, ""])


UNPRINTABLE_CASES = [
    pytest.param(b"", EMPTY, id="an empty file"),
    pytest.param(b"# only\n\n# comments\n", EMPTY, id="only comments"),
    pytest.param(b"cluster:\n  x: \xff\n", NOT_UTF8, id="not UTF-8"),
    pytest.param(b"cluster:\n\n  x: \x07\n", CONTROL, id="a control character"),
    pytest.param(b"cluster:\n\tx: y\n", TAB, id="a tab"),
    pytest.param(b"[" * 5000, NESTED, id="too deep"),
    pytest.param(
        f"{MINIMAL}limits: {{max_connections: 0x{'f' * 4000}}}\n"
        f"quotas: {{rules: [{{user: a, request_percentage: {'9' * 400}}}]}}\n",
        MANY_DIGITS,
        id="numbers of many digits",
    ),
]


@pytest.mark.parametrize(("content", "message"), [*error_cases(), *UNPRINTABLE_CASES])
def test_a_mistake_is_told_in_full(
    content: str | bytes, message: str, folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(content)
    assert str(caught.value).replace(f"{folder}{os.sep}", "") == message


def test_a_few_bytes_cannot_name_billions_of_values(
    folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    text = MINIMAL + laughs(9)
    assert len(text) < 1000
    with pytest.raises(ConfigError, match=r"aliases .* stand for more than 100000 values\n"):
        load(text)


def test_aliases_are_good_for_a_rule_of_many(load: Callable[[str | bytes], Config]) -> None:
    rules = [f"    - {{client-id: c{number}, consumer_byte_rate: *rate}}" for number in range(100)]
    text = "\n".join(["quotas:", "  window: 1s", "  rules:", *rules])
    text = text.replace("*rate}", "&rate 5MiB}", 1)
    config = load(f"{MINIMAL}{text}\n")
    assert {rule.consumer_byte_rate for rule in config.quotas.rules} == {5 * MIB}


@pytest.mark.parametrize("length", [4 * MIB, 4 * MIB + 1])
def test_a_file_that_is_too_long(load: Callable[[str | bytes], Config], length: int) -> None:
    text = MINIMAL + "#" * (length - len(MINIMAL))
    if length <= 4 * MIB:
        load(text)
        return
    with pytest.raises(ConfigError, match=r'config.yaml" has more than 4 MiB.*\n    fix: make it'):
        load(text)


def test_what_never_ends_is_too_long() -> None:
    with pytest.raises(ConfigError, match='"/dev/zero" has more than 4 MiB'):
        load_config(Path("/dev/zero"))


def test_a_pipe_is_read_where_somebody_writes_to_it(tmp_path: Path) -> None:
    """As a shell's `<(...)` is. Where nobody does, nobody is waited for."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe that nobody writes to\n    fix: name a file"):
        load_config(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that it can be opened for writing
    with path.open("w") as writer:
        writer.write(MINIMAL)
        writer.flush()
        threading.Timer(0.05, writer.close).start()
        config = load_config(path)
    os.close(reader)
    assert config.listeners[0].name == "a"


def test_a_pipe_whose_writer_says_nothing_is_given_up(
    folder: Path, load: Callable[[str | bytes], Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.config.files.FILE_LIMIT_S", 0.01)
    path = folder / "pipe"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    with pytest.raises(ConfigError, match=r"does not end within 0.01 s\n    fix: name a"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"admin.token_file: .* does not end within"):
        load(MINIMAL + f"admin: {{token_file: {path}}}\n")
    with pytest.raises(ConfigError, match=r"state.path: .* is no regular file"):
        load(MINIMAL + f"state: {{kind: sqlite, path: {path}}}\n")
    os.close(writer)


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


def test_a_directory_in_the_place_of_a_file_takes_no_descriptors(folder: Path) -> None:
    def count_open() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count_open()
    for _ in range(5):  # a watched file is read every second
        with pytest.raises(BadValueError, match="is a directory"):
            read_bytes(folder / "folder")
    assert count_open() == before


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
    assert config.cluster.sasl is None
    assert config.cluster.unknown_apis == "hide"
    assert config.listeners[0].tls is None
    assert config.quotas.model_dump() == {
        "source": "file",
        "window_ms": 1000.0,
        "samples": 11,
        "burst_ms": None,
        "budgets": (),
        "rules": (),
    }
    assert config.queries == ()
    assert config.pipelines == ()
    assert config.progress.model_dump() == {"answer_lookups": True}
    assert config.throttle.model_dump() == {
        "mode": "delay",
        "max_delay_ms": 20_000.0,
        "enforce": True,
    }
    assert asdict(config.limits) == {
        "max_connections": 10_000,
        "max_connections_per_ip": 1_000,
        "max_request_bytes": 100 * MIB,
        "max_in_flight_requests": 64,
        "idle_timeout_s": 600.0,
        "connect_timeout_s": 10.0,
        "drain_timeout_s": 10.0,
        "max_client_entities": 10_000,
    }
    assert config.state.model_dump() == {
        "kind": "sqlite",
        "path": folder / "quota-proxy.db",
        "topic": "quota-proxy-state",
        "on_damage": "refuse",
    }
    assert config.admin.bind == HostPort("127.0.0.1", 9644)
    assert config.admin.token_file is None
    assert config.log_level == "info"
    assert config.admin.tls is None
    assert config.admin.model_dump(exclude={"bind", "token_file", "tls"}) == {
        "tokens": (),
        "read_needs_token": False,
        "open_paths": ("/healthz", "/readyz", "/metrics"),
        "hosts": (),
        "max_connections": 500,
        "max_connections_per_ip": 200,
        "head_timeout": 10.0,
        "idle_timeout": 75.0,
    }


def test_tokens_with_rights_let_others_in(load: Callable[[str | bytes], Config]) -> None:
    tokens = "[{name: spark, token_file: token, rights: [report, read]}]"
    admin = load(f"{MINIMAL}admin: {{bind: 0.0.0.0:9644, tokens: {tokens}}}\n").admin
    assert admin.token_file is None
    assert [(each.name, each.rights) for each in admin.tokens] == [("spark", ("report", "read"))]


def test_secrets_that_others_may_read_are_noticed(
    folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    names = ("server.key", "other.key", "token", "lines", "more")
    for name, mode in zip(names, (0o644, 0o640, 0o604, 0o600, 0o660), strict=True):
        (folder / name).chmod(mode)
    config = load(
        MINIMAL + "admin:\n"
        "  tls: {cert_file: server.pem, key_file: server.key}\n"
        "  token_file: token\n"
        "  tokens:\n"
        "    - {name: a, token_file: lines, rights: [report]}\n"
        "    - {name: b, token_file: more, rights: [report]}\n"
    )
    assert set(named_files(config, but=PUBLIC_FILES)) == {
        folder / name for name in names if name != "other.key"
    }
    lines = list(find_exposed(named_files(config, but=PUBLIC_FILES)))
    assert [line.split()[0] for line in lines] == [
        str(folder / name) for name in ("server.key", "more", "token")
    ]
    assert "0604" in lines[2]
    assert f"fix: chmod 600 {folder}/token" in lines[2]
    for name in names:
        (folder / name).chmod(0o600)
    assert not list(find_exposed(named_files(config, but=PUBLIC_FILES)))


SASL = """\
cluster:
  bootstrap_servers: [broker-1:9092]
  sasl: {{mechanism: {}, username: anna, password_file: {}}}
  {}
listeners:
  - {{name: a, bind: 127.0.0.1:19092, advertised_host: h, broker_ports: 19100-19199}}
"""


@pytest.mark.parametrize("content", ["pass word", "pass word\n", "pass word\r\n"])
def test_a_password_is_all_but_the_end_of_its_line(
    content: str, folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    (folder / "password").write_bytes(content.encode())
    sasl = load(SASL.format("SCRAM-SHA-256", "password", "")).cluster.sasl
    assert sasl is not None
    assert (sasl.mechanism, sasl.username, read_password(sasl.password_file)) == (
        "SCRAM-SHA-256",
        "anna",
        "pass word",
    )
    assert "pass word" not in repr(sasl)
    (folder / "password").write_text("another")
    assert read_password(sasl.password_file) == "another"


@pytest.mark.parametrize(
    ("mechanism", "tls", "is_shown"),
    [
        ("PLAIN", "", True),
        ("PLAIN", "tls: {ca_file: ca.pem}", False),
        ("PLAIN", "tls: {}", False),
        ("SCRAM-SHA-512", "", False),
    ],
)
def test_a_password_that_goes_in_the_clear_is_noticed(
    mechanism: str, tls: str, is_shown: bool, load: Callable[[str | bytes], Config]
) -> None:
    cluster = load(SASL.format(mechanism, "token", tls)).cluster
    assert cluster.shows_password is is_shown


def _adaptive(config: Config) -> AdaptiveSection:
    (rule,) = config.quotas.rules
    assert rule.adaptive is not None
    return rule.adaptive


def _adaptive_rule(adaptive: str) -> str:
    rule = f"{{client-id: a, consumer_byte_rate: 1MB, adaptive: {{{adaptive}}}}}"
    return f"{MINIMAL}quotas: {{rules: [{rule}]}}\n"


def test_defaults_of_an_adaptive_bound(load: Callable[[str | bytes], Config]) -> None:
    assert _adaptive(load(_adaptive_rule(""))).model_dump() == {
        "min_rate": 100.0,
        "max_rate": None,
        "proportional": None,
        "integral": None,
        "derivative": None,
        "estimator": "cost",
        "batch_interval_ms": None,
        "initial_rate": None,
        "hold_ms": 30_000.0,
    }


@pytest.mark.parametrize(
    ("durations", "hold_ms"),
    [
        ("", 30_000.0),
        ("hold: 100ms", 100.0),
        ("batch_interval: 15s", 30_000.0),
        ("batch_interval: 1m", 120_000.0),
        ("batch_interval: 1m, hold: 61s", 61_000.0),
        ("batch_interval: 500ms, hold: 600ms", 600.0),
    ],
)
def test_a_bound_is_held_for_longer_than_a_batch_takes(
    durations: str, hold_ms: float, load: Callable[[str | bytes], Config]
) -> None:
    assert _adaptive(load(_adaptive_rule(durations))).hold_ms == hold_ms


@pytest.mark.parametrize(
    ("keys", "estimator"),
    [
        ("estimator: cost", "cost"),
        ("estimator: pid", "pid"),
        ("integral: 0.1", "pid"),
        ("derivative: 0, estimator: pid", "pid"),
    ],
)
def test_gains_are_of_pid(keys: str, estimator: str, load: Callable[[str | bytes], Config]) -> None:
    assert _adaptive(load(_adaptive_rule(keys))).estimator == estimator


def test_numbers_with_an_exponent(load: Callable[[str | bytes], Config]) -> None:
    """PyYAML takes them for text."""
    adaptive = _adaptive(
        load(
            _adaptive_rule("batch_interval: 2s, max_rate: 1e6, integral: 1.5e-07, derivative: 0e0")
        )
    )
    assert (adaptive.max_rate, adaptive.integral, adaptive.derivative) == (1e6, 1.5e-07, 0.0)


def test_queries(load: Callable[[str | bytes], Config]) -> None:
    config = load(
        MINIMAL
        + "queries:\n"
        + "  - {name: orders, client-id: etl-orders, commit_group: g, stuck_after: 90s}\n"
        + "  - {name: returns}\n"
    )
    orders, returns = config.queries
    assert (orders.name, orders.client_id) == ("orders", "etl-orders")
    assert (orders.commit_group, orders.stuck_after_ms) == ("g", 90_000.0)
    assert (returns.name, returns.client_id) == ("returns", "returns")
    assert (returns.commit_group, returns.stuck_after_ms) == (None, 300_000.0)
    assert config.place("queries[1]").endswith("config.yaml:6")


def test_a_rule_says_that_holds_are_expected(load: Callable[[str | bytes], Config]) -> None:
    keys = ("client-id: a, expected: true", "client-id: b")
    rules = "".join(f"    - {{{key}, consumer_byte_rate: 1MB}}\n" for key in keys)
    config = load(MINIMAL + f"quotas:\n  rules:\n{rules}")
    assert [rule.expected for rule in config.quota_settings.rules] == [True, False]


def test_answering_of_lookups_is_switched_off(load: Callable[[str | bytes], Config]) -> None:
    assert load(MINIMAL).progress_settings.answers_lookups
    config = load(MINIMAL + "progress: {answer_lookups: false}\n")
    assert not config.progress_settings.answers_lookups


PIPELINE = """\
pipelines:
  - name: orders
    hold_producers: true
    max_lag: 100000
    max_pending: {batches: 10, bytes: 64MiB}
    timeout: 5m
    sources:
      - {client-id: feed, produces: [A], normal_rate: 1000, step: 100}
    stages:
      - name: enrich
        queries: [enrich, enrich-again]
        client-ids: [etl-1]
        consumes: [A]
        produces: [B]
        band: [0, 1e3]
        sampling_interval: 500ms
        period: 20s
        ratio: 0.25
        normal_rate: 2000
        step: 200
        t_min_adjust: 0.1ms
"""


def test_a_pipeline_as_the_flow_takes_it(load: Callable[[str | bytes], Config]) -> None:
    config = load(MINIMAL + PIPELINE)
    (pipeline,) = config.pipelines
    enrich = StageSettings(
        name="enrich",
        queries=("enrich", "enrich-again"),
        client_ids=("etl-1",),
        consumes=("A",),
        produces=("B",),
        band=(0.0, 1000.0),
        sampling_interval_ms=500.0,
        period_ms=20_000.0,
        ratio=0.25,
        normal_rate=2000.0,
        step=200.0,
        t_min_adjust_ms=0.1,
    )
    assert asdict(pipeline) == asdict(
        PipelineSettings(
            name="orders",
            stages=(enrich,),
            sources=(
                SourceProducerSettings(
                    client_id="feed", produces=("A",), normal_rate=1000.0, step=100.0
                ),
            ),
            hold_producers=True,
            max_lag=100_000,
            max_pending=PendingLimit(batches=10, size_bytes=64 * MIB),
            timeout_ms=300_000.0,
        )
    )
    assert config.place("pipelines[0].stages[0]").endswith("config.yaml:13")


SHORT_PIPELINE = """\
pipelines:
  - name: orders
    sources: [{client-id: feed, produces: [A], normal_rate: 1000, step: 100}]
    stages: [{name: enrich, consumes: [A], band: [0, 1000], normal_rate: 2000, step: 200}]
"""


def test_defaults_of_a_pipeline(load: Callable[[str | bytes], Config]) -> None:
    (made,) = load(MINIMAL + SHORT_PIPELINE).pipelines
    assert (made.hold_producers, made.max_lag, made.max_pending) == (False, None, None)
    assert made.timeout_ms == 600_000.0
    (enrich,) = made.stages
    assert (enrich.members, enrich.produces) == (("enrich",), ())
    assert (enrich.sampling_interval_ms, enrich.period_ms) == (1000.0, 10_000.0)
    assert (enrich.ratio, enrich.t_min_adjust_ms) == (0.5, 1.0)


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


def test_of_rules_for_the_same_clients_only_the_largest_guarantee_counts(
    load: Callable[[str | bytes], Config],
) -> None:
    rules = """
    - {client-id: a, budget: all, guaranteed: 3MiB}
    - {client-id: a, budget: all, guaranteed: 5MiB, when: {from: "20:00", to: "06:00"}}
    - {client-id: b, budget: all, guaranteed: 4MiB}"""
    budgets = "budgets: [{name: all, consumer_byte_rate: 9MiB}]"
    config = load(f"{MINIMAL}quotas:\n  {budgets}\n  rules:{rules}\n")
    assert [rule.when is not None for rule in config.quota_settings.rules] == [False, True, False]


def test_the_spark_example(load: Callable[[str | bytes], Config]) -> None:
    config = load((EXAMPLES / "spark.yaml").read_text())
    adaptive = [rule for rule in config.quotas.rules if rule.adaptive]
    clients = {query.client_id for query in config.queries}
    assert {rule.client_id for rule in adaptive} & clients
    assert [query.commit_group for query in config.queries if query.commit_group]


def test_the_pipeline_example(load: Callable[[str | bytes], Config]) -> None:
    config = load((EXAMPLES / "pipeline.yaml").read_text())
    (pipeline,) = config.pipelines
    graph = PipelineGraph(pipeline)
    assert graph.upstream[graph.order[1]] == (graph.order[0],)
    members = {member for stage in graph.settings.stages for member in stage.members}
    assert members == {query.name for query in config.queries}


def _keys(section: object) -> Iterator[str]:
    for key, model_field in keys_of_section(section).items():
        yield key
        yield from _keys_within(model_field.annotation)


def _keys_within(annotation: object) -> Iterator[str]:
    yield from _keys(annotation)
    for inner in get_args(annotation):
        yield from _keys_within(inner)


def test_the_full_example_explains_every_key() -> None:
    words = set(re.findall(r"[\w-]+(?=:)", (EXAMPLES / "quota-proxy.yaml").read_text()))
    assert set(_keys(Config)) - words == set()


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_examples_load(example: Path, load: Callable[[str | bytes], Config]) -> None:
    assert load(example.read_text()).quotas.rules


def test_what_the_full_example_comments_out_loads_too(
    folder: Path, load: Callable[[str | bytes], Config]
) -> None:
    text = (EXAMPLES / "quota-proxy.yaml").read_text()
    copies = {"cluster-ca.pem": "ca.pem", "clients-ca.pem": "ca.pem", "proxy.pem": "server.pem"}
    copies |= {"proxy.key": "server.key", "admin-token": "token", "cluster-password": "token"}
    copies |= {"admins-ca.pem": "ca.pem", "ops-token": "lines", "spark-token": "more"}
    for name, source in copies.items():
        shutil.copy(folder / source, folder / name)
    keys = r"(?m)^( *)# ( *)(tls: |sasl: |token_file: |tokens:$|- \{name: (?:ops|spark),)"
    text, uncommented = re.subn(keys, r"\1\2\3", text)
    config = load(text)
    assert uncommented == 8
    assert [token.name for token in config.admin.tokens] == ["ops", "spark"]
    assert config.cluster.tls is not None
    assert config.cluster.sasl is not None
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
    ("an adaptive bound for every client", MINIMAL + "quotas: {rules: [{client-id: <default>, "
     "consumer_byte_rate: 1MB, adaptive: {batch_interval: 2s}}]}\n"),
    ("an adaptive bound of one listener and user by prefix", MINIMAL + "quotas: {rules: [{user: b, "
     "listener: a, client-id-prefix: etl-, scope: each, consumer_byte_rate: 1MB, adaptive: "
     "{batch_interval: 1ms}}]}\n"),
    ("one rate and no gain", _adaptive_rule("batch_interval: 2s, min_rate: 0.5, max_rate: 0.5, "
     "initial_rate: 0.5, proportional: 0, integral: 0.0, derivative: 0")),
    ("no query", MINIMAL + "queries: []\n"),
    ("as many queries as there may be", MINIMAL + "queries: [{name: a}, {name: b}]\n"
     "limits: {max_client_entities: 2}\n"),
    ("queries that change names", MINIMAL + "queries: [{name: a, client-id: b}, "
     "{name: b, client-id: a}]\n"),
    ("a commit_group with the name of a query", MINIMAL + "queries: [{name: a, commit_group: b}, "
     "{name: b}]\n"),
    ("no pipeline", MINIMAL + "pipelines: []\n"),
    ("a pipeline of queries that are not followed", MINIMAL + SHORT_PIPELINE
     + "queries: [{name: other}]\n"),
    ("a producer of two pipelines that is not held", MINIMAL + SHORT_PIPELINE
     + SHORT_PIPELINE.partition("\n")[2].replace("orders", "returns").replace("enrich", "audit")),
    ("as many sources and stages as there may be", MINIMAL + SHORT_PIPELINE
     + "limits: {max_client_entities: 2}\n"),
    ("a period of one sample", MINIMAL + SHORT_PIPELINE.replace("{name", "{sampling_interval: 10s, "
     "name")),
    ("no sample may be out of the band", MINIMAL + SHORT_PIPELINE.replace("{name", "{ratio: 0, "
     "name")),
    ("no drain", MINIMAL + "limits: {drain_timeout: 0}\n"),
    ("the shortest window", MINIMAL + "quotas: {window: 1ms}\n"),
    ("no burst", MINIMAL + "quotas: {burst: 0}\n"),
    ("a long burst", MINIMAL + "quotas: {burst: 10s}\n"),
    ("nothing kept", MINIMAL + "state: {kind: memory}\n"),
    ("state in a topic", MINIMAL + "state: {kind: kafka}\n"),
    ("state in a topic of that name", MINIMAL + "state: {kind: kafka, topic: proxy_1.state}\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), GOOD, ids=[name for name, _ in GOOD])
def test_good_configurations(
    name: str, content: str, load: Callable[[str | bytes], Config]
) -> None:
    config = load(content)
    assert config.quota_settings.window_ms >= 1
    assert config.listeners


SCRAP = st.sampled_from([None, 7, -1.5, "", "x", True, [], [7], ["?"], {}, {"name": "a"}])


@st.composite
def _nodes(draw: st.DrawFn, place: int) -> tuple[list[dict[str, object]], ...]:
    """Draw a source and stages of which each consumes what some other node produces."""
    rates: dict[str, object] = {"normal_rate": 1000, "step": 100}
    names = st.integers(0, 99).map(lambda number: f"{place}.{number}" if number < 95 else "shared")
    count = draw(st.integers(1, 3))
    source = {"client-id": draw(names), "produces": ["T0"], **rates}
    stages: list[dict[str, object]] = []
    for index in range(count):
        topics = st.integers(0, draw(st.sampled_from([index, index, index, count])))
        stage = {"name": draw(names), "band": [0, 10], **rates, "produces": [f"T{index + 1}"]}
        stage["consumes"] = [f"T{draw(topics)}"]
        if draw(st.booleans()):
            stage["queries"] = draw(st.lists(names, max_size=2))
        stages.append(stage)
    stages[0]["consumes"] = ["T0"]
    return [source], stages


@st.composite
def _pipelines(draw: st.DrawFn) -> list[dict[str, object]]:
    """Draw pipelines; some have scrap in the place of a value."""
    pipelines: list[dict[str, object]] = []
    for place in range(draw(st.integers(1, 2))):
        sources, stages = draw(_nodes(place))
        made = {"name": f"p{place}", "sources": sources, "stages": stages, "hold_producers": True}
        for part in (made, *sources, *stages):
            if draw(st.integers(0, 15)) == 15:
                part[draw(st.sampled_from(sorted(part)))] = draw(SCRAP)
        pipelines.append(made)
    return pipelines


@given(pipelines=_pipelines())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_pipelines_are_sound_or_refused(
    pipelines: list[dict[str, object]], load: Callable[[str | bytes], Config]
) -> None:
    """No document breaks the checks, no mistake is told twice, and what loads can be used."""
    problems: tuple[ConfigProblem, ...] = ()
    loaded: list[PipelineSettings] = []
    try:
        config = load(MINIMAL + yaml.safe_dump({"pipelines": pipelines}))
        loaded = list(config.pipelines)
    except ConfigError as error:
        problems = error.problems
    assert len(set(problems)) == len(problems)
    assert all(problem.key.startswith("pipelines") for problem in problems)
    assert all(PipelineGraph(pipeline).order for pipeline in loaded)
    assert list(find_shared_members(loaded)) == []
    assert len({pipeline.name for pipeline in loaded}) == len(loaded)


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


@given(st.floats(0, float(MAX_DURATION_S) * MS_PER_SECOND))
def test_a_duration_survives_being_written(duration_ms: float) -> None:
    assert parse_duration_or_zero(format_ms(duration_ms)) == duration_ms / MS_PER_SECOND


@given(st.integers(1, 8000), st.sampled_from(sorted(DURATION_UNITS)))
def test_a_duration_with_unit_survives_being_read(number: int, unit: str) -> None:
    seconds = parse_duration(f"{number}{unit}")
    assert Decimal(repr(seconds)) == number * DURATION_UNITS[unit]
    assert parse_duration(format_ms(seconds * MS_PER_SECOND)) == seconds


@given(st.floats(0, MAX_NUMBER))
def test_a_number_survives_being_written(number: float) -> None:
    assert yaml.safe_load(format_number(number)) == number


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


def test_free_broker_ports() -> None:
    ports = parse_broker_ports(0)
    assert (ports.any_free, str(ports)) == (True, "0")
