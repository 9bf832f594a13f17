"""A state file that is damaged at the start, or that goes while the proxy runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operating import call, quota_proxy, running
from support.proxy_process import ProxyProcess, config

from examples.devkit.broker import EmbeddedBroker

OVERRIDE = "/v1/quotas/client-id=etl"

SettingsBase = Callable[..., dict[str, Any]]


@pytest.fixture
def settings(kafka: EmbeddedBroker, tmp_path: Path) -> SettingsBase:
    def with_state(**state: str) -> dict[str, Any]:
        state |= {"kind": "sqlite", "path": str(tmp_path / "state.db")}
        return config(kafka.bootstrap, state=state)

    return with_state


def put(process: ProxyProcess, rate: int) -> tuple[int, Any]:
    answer = call(process, "PUT", OVERRIDE, {"consumer_byte_rate": rate})
    return answer.status, answer.document


def rates(process: ProxyProcess) -> list[float]:
    quotas = json.loads(process.get("/v1/quotas")[1])["quotas"]
    return [entry["bounds"]["consumer_byte_rate"] for entry in quotas]


@pytest.fixture
def damaged(settings: SettingsBase, tmp_path: Path) -> Path:
    """The state file of a proxy that has run."""
    with running(ProxyProcess(settings(), tmp_path / "before")) as process:
        assert put(process, 1000)[0] == 200
    path = tmp_path / "state.db"
    with path.open("r+b") as file:
        file.write(b"\0" * 100)
    return path


def test_by_default_it_is_refused_and_stays(
    damaged: Path, settings: SettingsBase, tmp_path: Path
) -> None:
    content = damaged.read_bytes()
    file = tmp_path / "refused.yaml"
    file.write_text(yaml.safe_dump(settings()))
    code, _, errors = quota_proxy("run", "-c", file)
    assert (code, f"{damaged} is not a state file" in errors) == (1, True)
    assert damaged.read_bytes() == content


def test_with_start_empty_it_is_kept_aside(
    damaged: Path, settings: SettingsBase, tmp_path: Path
) -> None:
    content = damaged.read_bytes()
    process = ProxyProcess(settings(on_damage="start_empty"), tmp_path / "after")
    with running(process):
        (line,) = process.log("the state is damaged, starting without its overrides and positions")
        assert line["level"] == "error"
        assert Path(line["kept"]).read_bytes() == content
        assert rates(process) == []
        assert put(process, 2000)[0] == 200
    with running(process):
        assert rates(process) == [2000]


def test_what_is_written_to_a_deleted_file_is_answered_with_an_error(
    settings: SettingsBase, tmp_path: Path
) -> None:
    process = ProxyProcess(settings(), tmp_path)
    with running(process):
        assert put(process, 1000)[0] == 200
        (tmp_path / "state.db").unlink()
        status, document = put(process, 2000)
        assert status == 503
        assert "state.db was deleted or replaced while it is in use" in json.dumps(document)
        assert call(process, "DELETE", OVERRIDE).status == 503
        assert rates(process) == [1000]
