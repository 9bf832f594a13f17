"""The admin port of a proxy that runs: rights, the audit over restarts, TLS, and floods."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from parts.reports import ReportingDriver, uuid
from support.forked import environment
from support.machine import machine_config, until_settled
from support.operating import call, hang_up, quota_proxy, running, write
from support.proxy_process import HOST, ProxyProcess, config, until

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener

NOBODY = f"{HOST}:9"
ETL = "/v1/quotas/client-id=etl"
FEW_FILES = 700
MANY_CONNECTIONS = 300
UNAVAILABLE = 503


def with_tokens(folder: Path, document: dict[str, Any], **admin: Any) -> dict[str, Any]:
    """Give a configuration with the tokens `ops`, who may all, and `spark`, who may report."""
    rights = {"ops": ["read", "report", "quotas"], "spark": ["report"]}
    tokens = []
    for name, given in rights.items():
        file = folder / f"{name}-token"
        file.write_text(f"{name}-text\n")
        file.chmod(0o600)
        tokens.append({"name": name, "token_file": str(file), "rights": given})
    return {**document, "admin": {"bind": f"{HOST}:0", "tokens": tokens, **admin}}


def audit(process: ProxyProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(process.get("/v1/audit")[1])["changes"]
    return found


@pytest.fixture(params=["sqlite", "kafka"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """Bootstrap servers, and a state that lasts."""
    if request.param == "sqlite":
        return NOBODY, {"kind": "sqlite", "path": str(tmp_path / "state.db")}
    broker: EmbeddedBroker = request.getfixturevalue("kafka")
    return broker.bootstrap, {"kind": "kafka", "topic": f"audit-{os.getpid()}"}


def test_who_changed_what_outlives_a_crash(
    state: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    servers, kept = state
    rules = [{"client-id": "etl", "consumer_byte_rate": "10MiB"}]
    document = with_tokens(tmp_path, config(servers, rules=rules, state=kept))
    with running(ProxyProcess(document, tmp_path)) as process:
        body = {"consumer_byte_rate": "20MiB", "by": "anna"}
        assert call(process, "PUT", ETL, body).status == 401
        assert call(process, "PUT", ETL, body, "spark-text").status == 403
        assert call(process, "PUT", ETL, body, "ops-text").status == 200
        assert call(process, "POST", "/v1/spark/batches", {}, "spark-text").status == 400
        (made,) = audit(process)
        assert (made["who"], made["address"], made["what"]) == ("ops", HOST, "quota client-id=etl")
        assert made["before"]["consumer_byte_rate"] == "10MiB per second"
        assert made["after"]["by"] == "anna"

        process.kill()
        process.start()
        assert audit(process) == [made]
        rules[0]["consumer_byte_rate"] = "30MiB"
        write(process, {**document, **with_tokens(tmp_path, config(servers, rules=rules))})
        hang_up(process)
        until(lambda: len(audit(process)) == 2, "the reload is recorded")
        loaded, _ = audit(process)
        assert (loaded["who"], loaded["address"]) == ("file", None)
        key = "quotas.rules[client-id=etl].consumer_byte_rate"
        assert (loaded["before"][key], loaded["after"][key]) == (
            "10MiB per second",
            "30MiB per second",
        )
        assert "ops-text" not in process.log_file.read_text()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_token_reports_on_its_own_queries_only(
    kafka: EmbeddedBroker, tmp_path: Path, workers: int
) -> None:
    document = with_tokens(tmp_path, machine_config(kafka.bootstrap, workers))
    document["admin"]["tokens"][1]["queries"] = ["team-a-*"]
    file = tmp_path / "admin-token"  # which members show each other
    file.write_text("admin-text\n")
    file.chmod(0o600)
    document["admin"]["token_file"] = str(file)
    names = [f"team-{team}-{number}" for team in "ab" for number in range(4)]
    drivers = [ReportingDriver(name, query_id=uuid(name), sender=uuid(name)) for name in names]
    with running(ProxyProcess(document, tmp_path)) as process:
        if workers > 1:
            until_settled(process, workers)

        def report(driver: ReportingDriver, event: str, **more: Any) -> tuple[int, str | None]:
            body = driver.document(event, **more)
            # 503: its slot goes from one worker to the other, as the listener sees it, too.
            answer = until(
                lambda: (
                    (made := call(process, "POST", "/v1/spark/batches", body, "spark-text")).status
                    != UNAVAILABLE
                    and made
                ),
                "an owner",
            )
            return answer.status, answer.document.get("reason")

        for driver in drivers:
            own = driver.name is not None and driver.name.startswith("team-a")
            for event in ("started", "running", "terminated"):
                assert report(driver, event) == ((200, None) if own else (403, "not_allowed"))
        assert report(drivers[-1], "started", client_id="team-a-0") == (403, "not_allowed")
        queries = json.loads(process.get("/v1/progress")[1])["queries"]
        assert {each["client_id"] for each in queries} == {f"team-a-{n}" for n in range(4)}
        refused = audit(process)
        assert {each["who"] for each in refused} == {"spark"}
        assert {each["after"].split()[-1] for each in refused} >= {f"'team-b-{n}'" for n in "0123"}


def test_a_secret_that_all_may_read_is_warned_of(tmp_path: Path) -> None:
    document = with_tokens(tmp_path, config(NOBODY, limits={"max_connections": 100}))
    (tmp_path / "spark-token").chmod(0o644)
    with running(ProxyProcess(document, tmp_path)) as process:
        (line,) = process.log("configuration hint")
    code, out, err = quota_proxy("check", "-c", process.config_file)
    assert (code, err) == (0, "")
    assert line["hint"] in out.splitlines()
    assert f"chmod 600 {tmp_path}/spark-token" in line["hint"]


def test_over_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert(HOST)
    own = authority.issue_cert("anna@example.com").private_key_and_cert_chain_pem
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    own.write_to_path(tmp_path / "own.pem")
    (tmp_path / "server.key").chmod(0o600)
    names = {"cert_file": "server.pem", "key_file": "server.key", "ca_file": "ca.pem"}
    tls = {key: str(tmp_path / name) for key, name in names.items()}
    document = with_tokens(
        tmp_path,
        config(NOBODY, queries=[{"name": "orders"}]),
        tls=tls,
        read_needs_token=True,
    )
    with running(ProxyProcess(document, tmp_path)) as process:
        url = process.admin_url.replace("http:", "https:")
        access = ["--ca-file", tmp_path / "ca.pem", "--cert-file", tmp_path / "own.pem"]
        token = ["--token-file", tmp_path / "ops-token"]
        code, out, err = quota_proxy("top", "--url", url, "--once", *access, *token)
        assert (code, err) == (0, "")
        assert "orders" in out
        for arguments, said in (
            (access, "401"),
            ([*access, "--token-file", tmp_path / "spark-token"], "403"),
            (token, "does not answer"),
        ):
            code, out, err = quota_proxy("top", "--url", url, "--once", *arguments)
            assert (code, out) == (1, "")
            assert said in err
        files = {"ca_file": str(tmp_path / "ca.pem"), "cert_file": str(tmp_path / "own.pem")}
        listener = QuotaListener(url, token="spark-text", **files)
        answer = listener._channel.post(b"{}")  # noqa: SLF001 - the listener sends no such report
        assert (answer.status, answer.reason) == (400, "malformed")
        assert listener.close()


@pytest.fixture
def short_of_files(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Starts a proxy that may open few files; gives a function that finds a line of its log."""
    file, log = tmp_path / "proxy.yaml", tmp_path / "proxy.log"
    file.write_text(yaml.safe_dump(config(kafka.bootstrap)))
    command = ["sh", "-c", f'ulimit -n {FEW_FILES}; exec "$@"', "sh", sys.executable]
    command += ["-m", "proxy", "run", "-c", str(file), "--log-format", "json"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment()
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", log.read_text()

            def line(event: str) -> Any:
                lines = map(json.loads, log.read_text().splitlines())
                return next((each for each in lines if each["event"] == event), None)

            yield line
        finally:
            process.terminate()
            process.wait(60)


def test_floods_keep_neither_operators_nor_clients_out(
    short_of_files: Callable[[str], Any],
) -> None:
    """Of both ports at once, in a process that may open few files."""
    line = short_of_files
    _, own_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (own_limit, own_limit))
    client_port, admin_port = line("listening")["port"], line("admin")["port"]
    assert f"the system allows {FEW_FILES} open files" in line("configuration hint")["hint"]
    with ExitStack() as stack:

        def connect(port: int, address: str) -> socket.socket:
            source = (address, 0)
            return stack.enter_context(socket.create_connection((HOST, port), 30, source))

        for number in range(MANY_CONNECTIONS):
            connect(client_port, "127.0.0.2")
            connect(admin_port, f"127.0.0.{3 + number % 3}").sendall(b"GET / HTTP/1.1\r\n")
        operator = connect(admin_port, HOST)
        operator.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: operator.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'connections_rejected_total{member="0",reason="too_many_connections"}' in answer
    assert b'connections_rejected_total{member="0",reason="out_of_files"} 0.0' in answer
    assert line("can't accept") is None
    text = "too many connections to the admin port: those idle for longest are closed"
    assert line(text)["crowded_by"] != HOST
