"""A changed configuration takes effect in a running proxy; a bad one changes nothing."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operating import call, hang_up, reloads, running, until_bound, until_reloads, write
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, api_versions, fetch

from examples.devkit.broker import EmbeddedBroker

NOTICED_WITHIN_S = 10
SOON = {"proxy.config.reload.WATCH_INTERVAL_S": 0.4}
"""Where it is not the point how soon a change is noticed."""
LOOK_LIMIT_S = 4.0
GIVES_UP_SOON = {**SOON, "proxy.config.reload.LOOK_LIMIT_S": LOOK_LIMIT_S}
STORM_LOADS = 3
PLENTY_BYTES = 10**9
SLOW_BOUND_BYTES = 50_000
RECORD_BYTES = 500_000
CLIENT = "etl"

Make = Callable[..., dict[str, Any]]
"""`make(bound, **parts of the configuration)`."""


@pytest.fixture
def make(kafka: EmbeddedBroker) -> Make:
    def with_bound(bound: int, **parts: Any) -> dict[str, Any]:
        rules = [{"client-id": CLIENT, "consumer_byte_rate": bound}]
        return config(kafka.bootstrap, rules=rules, **parts)

    return with_bound


@pytest.fixture
def process(make: Make, tmp_path: Path) -> Iterator[ProxyProcess]:
    """A proxy that gives CLIENT plenty."""
    with running(ProxyProcess(make(PLENTY_BYTES), tmp_path, constants=GIVES_UP_SOON)) as started:
        yield started


@pytest.fixture
def records(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    """A topic with one large record."""
    name = topic()
    fill(name, 1, RECORD_BYTES)
    return name


def loads(process: ProxyProcess) -> list[dict[str, str]]:
    """What the status page shows, the newest first."""
    found: list[dict[str, str]] = json.loads(process.get("/v1/status")[1])["config_loads"]
    return found


class ConfigMap:
    """A file as a Kubernetes volume has it: behind a link to a folder that is replaced."""

    def __init__(self, process: ProxyProcess) -> None:
        self._link = process.config_file.parent / "..data"
        self._number = 0
        self.swap(process.config_file.read_text())
        process.config_file.unlink()
        process.config_file.symlink_to(Path("..data") / process.config_file.name)

    def swap(self, text: str) -> None:
        """Put a new folder in the place of the old one."""
        self._number += 1
        folder = self._link.parent / f"..{self._number}"
        folder.mkdir()
        (folder / "proxy.yaml").write_text(text)
        new = self._link.with_name("..data_tmp")
        new.symlink_to(folder.name)
        new.replace(self._link)


def change_file(process: ProxyProcess, text: str) -> None:
    write(process, text)


def change_in_place(process: ProxyProcess, text: str) -> None:
    process.config_file.write_text(text)


def change_and_hang_up(process: ProxyProcess, text: str) -> None:
    write(process, text)
    hang_up(process)


@pytest.mark.parametrize("change", [change_file, change_in_place, change_and_hang_up])
def test_rules_are_swapped_under_a_connection_in_use(
    process: ProxyProcess, make: Make, records: str, change: Callable[[ProxyProcess, str], None]
) -> None:
    assert reloads(process) == {"ok": 0, "failed": 0}
    with RawClient(process.bootstrap, CLIENT) as client:
        until_bound(process, client, records, PLENTY_BYTES, NOTICED_WITHIN_S)
        change(process, yaml.safe_dump(make(PLENTY_BYTES + 1)))
        until_bound(process, client, records, PLENTY_BYTES + 1, NOTICED_WITHIN_S)
    until(lambda: reloads(process)["ok"] >= 1, "it is counted")
    done = reloads(process)
    assert done["failed"] == 0
    # The file is noticed by itself, and asked for by the signal: once or twice.
    assert 1 <= done["ok"] <= (2 if change is change_and_hang_up else 1)
    assert (loads(process)[0]["result"], loads(process)[0]["message"]) == ("ok", "in force")


def test_a_config_map_is_noticed(make: Make, tmp_path: Path, records: str) -> None:
    process = ProxyProcess(make(PLENTY_BYTES), tmp_path)
    mounted = ConfigMap(process)
    with running(process), RawClient(process.bootstrap, CLIENT) as client:
        for bound in (PLENTY_BYTES + 1, PLENTY_BYTES + 2):
            mounted.swap(yaml.safe_dump(make(bound)))
            until_bound(process, client, records, bound, NOTICED_WITHIN_S)
        until_reloads(process, ok=2, failed=0)


def test_a_signal_loads_an_unchanged_file(process: ProxyProcess) -> None:
    hang_up(process)
    until(lambda: reloads(process)["ok"] == 1, "it is loaded")


def test_the_log_level_is_that_of_the_file_until_somebody_sets_another(
    process: ProxyProcess, make: Make
) -> None:
    def is_told() -> bool:
        """Whether the end of a connection is in the log."""
        before = len(process.log("connection closed"))
        with RawClient(process.bootstrap) as client:
            client.ask(api_versions(3))
        until(lambda: not process.metrics().value("connections"), "it is closed")
        return len(process.log("connection closed")) > before

    assert not is_told()
    write(process, make(PLENTY_BYTES) | {"log_level": "debug"})
    until(lambda: reloads(process)["ok"] == 1, "it is loaded")
    until(is_told, "it is written")
    assert call(process, "PUT", "/v1/log_level", {"level": "warning"}).status == 200
    assert not is_told()
    hang_up(process)
    until(lambda: reloads(process)["ok"] == 2, "it is loaded")
    until(is_told, "it is written")


def test_a_storm_of_signals_is_a_load_a_second(process: ProxyProcess) -> None:
    begun_s = time.monotonic()
    until(lambda: hang_up(process) or reloads(process)["ok"] > STORM_LOADS, "it is loaded")
    stormed_s = time.monotonic() - begun_s
    time.sleep(2)
    done = reloads(process)
    assert done["ok"] <= stormed_s + 2
    assert done["failed"] == 0


def hang_file(process: ProxyProcess) -> int:
    """Put a pipe in the place of the file, which is as a file system that is gone: somebody has it
    open and does not write to it. Return the descriptor that keeps it open.
    """
    process.config_file.unlink()
    os.mkfifo(process.config_file)
    return os.open(process.config_file, os.O_RDWR)


@pytest.fixture(scope="module")
def hung(kafka: EmbeddedBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy whose file hangs.

    Of the module: it takes LOOK_LIMIT_S until that is given up, in which another test runs.
    """
    folder = tmp_path_factory.mktemp("hung")
    process = ProxyProcess(config(kafka.bootstrap), folder, constants=GIVES_UP_SOON)
    with running(process):
        keeping = hang_file(process)
        try:
            yield process
        finally:
            os.close(keeping)


@pytest.mark.slow
@pytest.mark.usefixtures("hung")
def test_a_path_that_hangs_stops_nothing(process: ProxyProcess, make: Make, records: str) -> None:
    whole = process.config_file.read_text()
    keeping = hang_file(process)
    with RawClient(process.bootstrap, CLIENT) as client:
        until(lambda: reloads(process)["failed"] == 1, "it is given up")
        hang_up(process)
        until_bound(process, client, records, PLENTY_BYTES, NOTICED_WITHIN_S)
        said = f"was not read in {LOOK_LIMIT_S:g} s\n    fix: look at the file system"
        assert said in loads(process)[0]["message"]
        process.config_file.unlink()
        process.config_file.write_text(whole.replace(str(PLENTY_BYTES), str(PLENTY_BYTES + 1)))
        os.close(keeping)
        until_bound(process, client, records, PLENTY_BYTES + 1, NOTICED_WITHIN_S)
    assert reloads(process)["failed"] == 1


@pytest.mark.slow
def test_a_path_that_hangs_does_not_keep_it_from_stopping(hung: ProxyProcess) -> None:
    until(lambda: reloads(hung)["failed"] == 1, "it is given up")
    hung.stop()


def test_what_was_measured_is_kept(make: Make, tmp_path: Path, records: str) -> None:
    """The window is so long that only a lost history could let the rate sink."""
    slow = {"quotas": {"window": "10m"}}
    process = ProxyProcess(make(PLENTY_BYTES, **slow), tmp_path, constants=SOON)
    with running(process), RawClient(process.bootstrap, CLIENT) as client:
        client.ask(fetch(12, records))
        before = process.metrics().value("rate_bytes", quota="consumer_byte_rate")
        assert before > 0
        write(process, make(PLENTY_BYTES + 1, **slow))
        until(lambda: reloads(process)["ok"] == 1, "it is loaded")
        client.ask(fetch(12, records))
        metrics = process.metrics()
        assert metrics.value("bound_bytes") == PLENTY_BYTES + 1
        assert metrics.value("rate_bytes") == pytest.approx(2 * before, rel=0.1)


def test_a_held_response_survives_it(make: Make, tmp_path: Path, records: str) -> None:
    """It stays held, other clients go on, and it arrives whole when its time has come."""
    process = ProxyProcess(make(SLOW_BOUND_BYTES, throttle={"max_delay": "4s"}), tmp_path)
    with (
        running(process),
        RawClient(process.bootstrap, CLIENT) as held,
        RawClient(process.bootstrap, "other") as other,
    ):
        held.send(fetch(12, records))
        until(lambda: process.metrics().value("delay_queue_size", api="fetch") == 1, "it is held")
        write(process, make(PLENTY_BYTES))
        hang_up(process)
        until(lambda: reloads(process)["ok"] >= 1, "it is loaded")
        assert other.ask(api_versions(3)).error_code == 0
        assert len(held.receive().responses[0].partitions[0].records) > RECORD_BYTES
        assert process.metrics().value("connections") == 2


def bad_value(document: dict[str, Any]) -> str:
    document["quotas"]["rules"][0]["consumer_byte_rate"] = "fast"
    return yaml.safe_dump(document)


def unknown_key(document: dict[str, Any]) -> str:
    return yaml.safe_dump({**document, "speed": 1})


def no_yaml(document: dict[str, Any]) -> str:
    return "cluster: ["


def nothing(document: dict[str, Any]) -> str:
    return ""


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(bad_value, "fast"), (unknown_key, "speed"), (no_yaml, "proxy.yaml:1"), (nothing, "empty")],
)
def test_a_bad_file_changes_nothing(
    process: ProxyProcess,
    make: Make,
    records: str,
    spoil: Callable[[dict[str, Any]], str],
    said: str,
) -> None:
    with RawClient(process.bootstrap, CLIENT) as client:
        client.ask(fetch(12, records))
        write(process, spoil(make(1)))
        until(lambda: reloads(process)["failed"] == 1, "it is refused")
        newest = loads(process)[0]
        (line,) = process.logged("configuration not reloaded, the old one stays")
        assert newest["result"] == "failed"
        assert newest["message"] == line["problems"]
        assert said in line["problems"]
        assert "fix: " in line["problems"]
        until_bound(process, client, records, PLENTY_BYTES, NOTICED_WITHIN_S)

        write(process, make(PLENTY_BYTES + 1))
        until_bound(process, client, records, PLENTY_BYTES + 1, NOTICED_WITHIN_S)
    until_reloads(process, ok=1, failed=1)


def test_a_file_that_is_gone_changes_nothing(process: ProxyProcess, make: Make) -> None:
    process.config_file.unlink()
    until(lambda: reloads(process)["failed"] == 1, "it is refused")
    assert "does not exist" in loads(process)[0]["message"]
    assert process.metrics().value("config_last_reload_successful") == 0
    write(process, make(PLENTY_BYTES))
    until(lambda: reloads(process)["ok"] == 1, "it is back")
    assert process.metrics().value("config_last_reload_successful") == 1
    assert reloads(process)["failed"] == 1


def test_rules_that_come_and_go_are_counted(process: ProxyProcess, make: Make) -> None:
    """One who edits the wrong file, or half of one, sees it in the log."""

    def of(*names: str) -> dict[str, Any]:
        quotas = {"rules": [{"client-id": name, "consumer_byte_rate": "1MiB"} for name in names]}
        return make(PLENTY_BYTES) | {"quotas": quotas}

    told = []
    for number, names in enumerate(["abcdefghij", "abc", "bcd", "bcd"], 1):
        write(process, of(*names))
        if number == 4:
            hang_up(process)
        until_reloads(process, ok=number, failed=0)
        told.append(process.log("configuration reloaded")[-1]["message"])
    assert told == [
        "in force; rules 1 -> 10 (10 added, 1 removed)",
        "in force; rules 10 -> 3 (7 removed)",
        "in force; rules 3 -> 3 (1 added, 1 removed)",
        "in force",
    ]
    assert [load["message"] for load in loads(process)[:4]] == told[::-1]


def test_what_waits_for_a_restart_is_named(process: ProxyProcess, make: Make, records: str) -> None:
    """All the rest of the file is in force at once."""
    new = make(
        PLENTY_BYTES + 1,
        listeners=[{"name": "another"}],
        limits={"max_client_entities": 5},
        throttle={"mode": "mute"},
    )
    write(process, new)
    with RawClient(process.bootstrap, CLIENT) as client:
        until_bound(process, client, records, PLENTY_BYTES + 1, NOTICED_WITHIN_S)
    until_reloads(process, ok=1, failed=0)
    message = "after a restart: listeners, limits.max_client_entities"
    assert loads(process)[0]["message"] == message
    (line,) = process.logged("configuration reloaded")
    assert line["message"] == message
    assert json.loads(process.get("/v1/status")[1])["throttle_mode"] == "mute"
