"""Quotas that operators change at run time: who may, what lasts, and state that can't be used."""

import json
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operating import call, hang_up, quota_proxy, reloads, running, until_bound
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient

from examples.devkit.broker import EmbeddedBroker
from proxy.state import SqliteStore

TOKEN = "let-me-in"
CLIENT = "etl"
PATH = f"/v1/quotas/client-id={CLIENT}"
PLENTY_BYTES = 10**9
OVERRIDE_BYTES = 2 * 10**9
AT_ONCE_S = 5
NOBODY = f"{HOST}:9"
LOG_ROOM_BYTES = 8192
"""A limit to the length of files that the log keeps to, and the state does not."""


def guarded(bootstrap: str, folder: Path, bound: int = PLENTY_BYTES) -> dict[str, Any]:
    """A configuration with a state that lasts and a token."""
    token_file = folder / "token"
    token_file.write_text(f"{TOKEN}\n")
    return {
        **config(bootstrap, rules=[{"client-id": CLIENT, "consumer_byte_rate": bound}]),
        "state": {"kind": "sqlite", "path": str(folder / "state.db")},
        "admin": {"bind": f"{HOST}:0", "token_file": str(token_file)},
    }


@pytest.fixture
def process(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[ProxyProcess]:
    with running(ProxyProcess(guarded(kafka.bootstrap, tmp_path), tmp_path)) as started:
        yield started


@pytest.fixture
def record(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    """A topic with a small record."""
    name = topic()
    fill(name, 1, 1000)
    return name


def overrides(process: ProxyProcess) -> list[dict[str, Any]]:
    entries = json.loads(process.get("/v1/quotas")[1])["quotas"]
    return [entry for entry in entries if entry["source"] == "override"]


@pytest.mark.parametrize("token", [None, "", "wrong", f"{TOKEN}x", TOKEN.upper()])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_nobody_changes_a_quota_without_the_token(
    process: ProxyProcess, method: str, token: str | None
) -> None:
    answer = call(process, method, PATH, {"consumer_byte_rate": 1}, token)
    assert answer.status == 401
    assert "token" in answer.document["error"]
    assert overrides(process) == []


def test_a_state_that_cannot_be_written_is_told_and_mends_itself(process: ProxyProcess) -> None:
    def put(bound: int) -> int:
        return call(process, "PUT", PATH, {"consumer_byte_rate": bound}, TOKEN).status

    def is_writable() -> float:
        return process.metrics().value("state_writable")

    assert (put(OVERRIDE_BYTES), is_writable()) == (200, 1)
    no_limit = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (LOG_ROOM_BYTES, no_limit[1]))
    try:
        assert put(OVERRIDE_BYTES + 1) == 503
        assert is_writable() == 0
        (line,) = process.logged("state not writable")
        assert line["fix"]
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, no_limit)
    assert (put(OVERRIDE_BYTES + 2), is_writable()) == (200, 1)
    process.logged("state writable again")


def test_an_override_outlives_a_crash_until_it_is_taken_back(
    process: ProxyProcess, record: str
) -> None:
    began = datetime.now(UTC) - timedelta(seconds=1)
    with RawClient(process.bootstrap, CLIENT) as client:
        until_bound(process, client, record, PLENTY_BYTES, AT_ONCE_S)
        body = {"consumer_byte_rate": OVERRIDE_BYTES, "by": "anna"}
        assert call(process, "PUT", PATH, body, TOKEN).status == 200
        until_bound(process, client, record, OVERRIDE_BYTES, AT_ONCE_S)
    (made,) = overrides(process)
    assert (made["by"], made["bounds"]) == ("anna", {"consumer_byte_rate": OVERRIDE_BYTES})
    assert began <= datetime.fromisoformat(made["at"]) <= datetime.now(UTC)

    process.kill()
    process.start()
    assert overrides(process) == [made]
    with RawClient(process.bootstrap, CLIENT) as client:
        until_bound(process, client, record, OVERRIDE_BYTES, AT_ONCE_S)
        assert call(process, "DELETE", PATH, token=TOKEN).status == 200
        until_bound(process, client, record, PLENTY_BYTES, AT_ONCE_S)
    assert call(process, "DELETE", PATH, token=TOKEN).status == 404

    process.stop()
    process.start()
    assert overrides(process) == []


def test_a_reload_leaves_overrides_in_force(process: ProxyProcess, record: str) -> None:
    body = {"consumer_byte_rate": OVERRIDE_BYTES}
    assert call(process, "PUT", PATH, body, TOKEN).status == 200
    changed = guarded("127.0.0.1:1", process.config_file.parent, PLENTY_BYTES + 1)
    process.config_file.write_text(yaml.safe_dump(changed))
    hang_up(process)
    until(lambda: reloads(process)["ok"] >= 1, "it is loaded")
    with RawClient(process.bootstrap, CLIENT) as client:
        until_bound(process, client, record, OVERRIDE_BYTES, AT_ONCE_S)
        call(process, "DELETE", PATH, token=TOKEN)
        until_bound(process, client, record, PLENTY_BYTES + 1, AT_ONCE_S)


def sql(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100:] = b"\xff" * (len(content) - 100)
    path.write_bytes(content)


def no_database(path: Path) -> None:
    path.write_bytes(b"not a database at all, but long enough to look like one" * 100)


def newer(path: Path) -> None:
    sql(path, "PRAGMA user_version = 99")


def of_another_program(path: Path) -> None:
    sql(path, "PRAGMA application_id = 7")


def newer_record(path: Path) -> None:
    sql(path, "UPDATE record SET version = 99")


def spoilt_record(path: Path) -> None:
    sql(path, "UPDATE record SET value = '{}'")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (damage, "state.db"),
        (no_database, "state.db"),
        (newer, "newer version"),
        (of_another_program, "another program"),
        (newer_record, "form 99"),
        (spoilt_record, "cannot be read"),
    ],
)
def test_state_that_cannot_be_used_is_said_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """Not a mistake in usage, so the exit code is 1."""
    path = tmp_path / "state.db"
    value = {"bounds": {"consumer_byte_rate": 5.0}, "scope": "each", "by": None, "at_s": None}
    with closing(SqliteStore(path)) as store:
        store.put("quotas/client-id=etl", value, 1)
    spoil(path)
    before = path.read_bytes()
    code, out, err = run(guarded(NOBODY, tmp_path), tmp_path)
    assert (code, out) == (1, "")
    assert said in err
    assert "    fix: " in err
    assert "Traceback" not in err
    assert path.read_bytes() == before


def test_two_proxies_do_not_share_a_state(process: ProxyProcess, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    code, out, err = run(yaml.safe_load(process.config_file.read_text()), second)
    assert (code, out) == (1, "")
    assert "in use" in err
    assert "    fix: " in err


def run(document: dict[str, Any], folder: Path) -> tuple[int, str, str]:
    """Run a proxy that can't start; give exit code, output and errors."""
    file = folder / "proxy.yaml"
    file.write_text(yaml.safe_dump(document))
    return quota_proxy("run", "-c", file)
