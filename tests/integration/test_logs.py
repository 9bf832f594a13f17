"""What the log says: each change of state once, never a payload or a secret, in two formats."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clients import CLIENTS, Access, Client, Librdkafka
from support.operating import call, quota_proxy, running
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, fetch

from examples.devkit.broker import EmbeddedBroker

BOUND_BYTES = 1_000_000
RECORD_BYTES = 100_000
MANY = 100
HELD_TOPIC = "held"
QUIET_S = 12
"""After so long without a hold a client counts as throttled no more, here; 30 by itself."""

PAYLOAD = b"payload-that-no-log-may-show"
KEY_WORDS = {"client", "quota", "rule", "rate", "bound", "event", "level", "timestamp"}


@dataclass(frozen=True, slots=True)
class Held:
    """A proxy that held two clients, and what it had said of that when both had just gone."""

    process: ProxyProcess
    began: list[dict[str, Any]]
    ended: list[dict[str, Any]]


@pytest.fixture(scope="module")
def held(kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Held]:
    """Of the module, so that QUIET_S goes by while other tests run."""
    folder, quiet = tmp_path_factory.mktemp("held"), {"proxy.quota.meters.QUIET_MS": 1000 * QUIET_S}
    rules = [{"client-id": "<default>", "consumer_byte_rate": BOUND_BYTES}]
    made = config(kafka.bootstrap, rules=rules, throttle={"max_delay": "20ms"})
    Librdkafka().produce(Access(kafka.bootstrap), HELD_TOPIC, [(0, bytes(RECORD_BYTES))])
    with running(ProxyProcess(made, folder, constants=quiet)) as process:
        for client_id in ("one", "two"):
            with RawClient(process.bootstrap, client_id) as client:
                for _ in range(MANY):
                    client.ask(fetch(12, HELD_TOPIC))
            holds = process.metrics().value(
                "throttled_responses_total", quota_entity=f"client-id={client_id}"
            )
            assert holds > MANY / 2
        yield Held(process, process.logged("throttling began", 2), process.log("throttling ended"))


def check_throttling(lines: list[dict[str, Any]]) -> None:
    assert [line["client"] for line in lines] == ["client-id=one", "client-id=two"]
    for line in lines:
        assert line.keys() == KEY_WORDS
        assert (line["level"], line["bound"]) == ("info", BOUND_BYTES)
        assert line["quota"] == "consumer_byte_rate"
        assert "rule 0" in line["rule"]


@pytest.mark.slow
def test_throttling_is_logged_when_it_begins(held: Held) -> None:
    check_throttling(held.began)
    assert held.began[0]["rate"] > BOUND_BYTES
    assert held.ended == []


def test_no_line_for_a_response(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    process = proxy()
    name = topic()
    fill(name, 1, 1000)
    with RawClient(process.bootstrap, "client") as client:
        for _ in range(MANY):
            client.ask(fetch(12, name))
    process.stop()
    assert len(process.log()) < MANY / 2


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_no_secret_and_no_payload(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    topic: Callable[..., str],
    client: Client,
) -> None:
    process = proxy(bootstrap_servers=kafka.sasl_bootstrap)
    name = topic()
    password = kafka.settings.sasl_users["alice"]
    access = Access(process.bootstrap, client.name, user="alice", password=password)
    client.produce(access, name, [(0, PAYLOAD)])
    assert client.consume(access, name, 1).values[0] == [PAYLOAD]
    assert process.metrics().value("bytes_total", user="alice", api="Fetch") > 0, "it logged in"
    log = process.log_file.read_text()
    assert password not in log
    assert PAYLOAD.decode() not in log


def test_the_admin_token_is_not_logged(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    token, wrong = "token-of-the-admin", "token-of-a-stranger"
    token_file = tmp_path / "token"
    token_file.write_text(token)
    guarded = config(kafka.bootstrap)
    guarded["admin"]["token_file"] = str(token_file)
    with running(ProxyProcess(guarded, tmp_path)) as process:
        path, body = "/v1/quotas/user=alice", {"consumer_byte_rate": 5, "by": "anna"}
        assert call(process, "PUT", path, body, wrong).status == 401
        assert call(process, "PUT", path, body, token).status == 200
        assert call(process, "DELETE", path, token=token).status == 200
        changes = [
            process.logged(event) for event in ("quota overridden", "quota override deleted")
        ]
        assert [line["selector"] for (line,) in changes] == ["user=alice"] * 2
        log = process.log_file.read_text()
        assert token not in log
        assert wrong not in log


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_formats(kafka: EmbeddedBroker, tmp_path: Path, log_format: str) -> None:
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(config(kafka.bootstrap)))
    command = [sys.executable, "-m", "proxy", "run", "-c", str(file), "--log-format", log_format]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        out, err = process.communicate()
    assert (process.returncode, out) == (0, "")
    lines = err.splitlines()
    (listening,) = [line for line in lines if "listening" in line]
    assert HOST in listening
    if log_format == "json":
        assert all({"event", "level", "timestamp"} <= json.loads(line).keys() for line in lines)
    else:
        assert not any(line.startswith("{") for line in lines)
        assert "\x1b" not in err, "no colours where nobody looks"


LOGS_A_CLIENT = """
from structlog import get_logger
from proxy.cli import configure_logging
configure_logging("console")
log, name = get_logger(), "\\x1b]0;pwn\\x07\\x00\\nforged \\u0416"
log.info("quota", client=name, clients=[name])
try:
    raise ValueError(name)
except ValueError:
    log.exception("failed")
"""


def test_no_client_id_steers_the_terminal() -> None:
    command = [sys.executable, "-c", LOGS_A_CLIENT]
    err = subprocess.run(command, capture_output=True, check=True).stderr.decode()
    assert all(char.isprintable() for line in err.split("\n") for char in line)
    assert r"client='\x1b]0;pwn\x07\x00\nforged Ж'" in err
    assert "\nTraceback" in err


def test_an_unknown_format() -> None:
    code, _, errors = quota_proxy("run", "-c", "x.yaml", "--log-format", "xml")
    assert code == 2
    assert "json" in errors


@pytest.mark.slow
def test_throttling_is_logged_when_it_ends(held: Held) -> None:
    ended = until(
        lambda: len(lines := held.process.log("throttling ended")) == 2 and lines,
        "it has ended for both",
        2 * QUIET_S,
    )
    check_throttling(ended)
    assert held.process.log("throttling began") == held.began
