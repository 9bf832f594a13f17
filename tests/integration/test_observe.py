"""Before a real broker: quotas that are not enforced yet, and quotas that are paused."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.operating import call, quota_proxy, running, write
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, fetch

from examples.devkit.broker import EmbeddedBroker

CLIENT = "etl"
ENTITY = f"client-id={CLIENT}"
BOUND_BYTES = 20_000
RECORD_BYTES = 500_000
"""Is held for more than 20 s, as long as a single hold may be."""

RELEASED_S = 10

Make = Callable[..., dict[str, Any]]


@pytest.fixture
def make(kafka: EmbeddedBroker, tmp_path: Path) -> Make:
    """`make(**keys of the rule)`."""

    def with_rule(**keys: Any) -> dict[str, Any]:
        rule = {"client-id": CLIENT, "consumer_byte_rate": BOUND_BYTES, **keys}
        state = {"kind": "sqlite", "path": str(tmp_path / "state.db")}
        return config(kafka.bootstrap, rules=[rule], state=state)

    return with_rule


@pytest.fixture
def record(topic: Callable[..., str], fill: Callable[..., None]) -> str:
    """A topic with one large record."""
    name = topic()
    fill(name, 1, RECORD_BYTES)
    return name


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


def held(process: ProxyProcess) -> float:
    return process.metrics().value("throttled_responses_total", quota_entity=ENTITY)


def above(process: ProxyProcess) -> float:
    return process.metrics().value("would_throttle_total", quota_entity=ENTITY)


def read(process: ProxyProcess, record: str, times: int = 3) -> None:
    with RawClient(process.bootstrap, CLIENT) as client:
        for _ in range(times):
            client.ask(fetch(12, record))


def until_held(process: ProxyProcess, record: str, pool: ThreadPoolExecutor) -> Any:
    """Read until a response is held; give what waits for it."""
    reading = pool.submit(read, process, record, 1)
    until(lambda: process.metrics().value("delay_queue_size", api="fetch"), "it is held")
    return reading


def test_a_quota_is_observed_and_then_enforced(
    make: Make, tmp_path: Path, record: str, pool: ThreadPoolExecutor
) -> None:
    with running(ProxyProcess(make(enforce=False), tmp_path)) as process:
        read(process, record)
        assert (held(process), above(process)) == (0, 3)
        (row,) = json.loads(process.get("/v1/clients")[1])["clients"]
        assert (row["enforced"], row["throttled"], row["rate"] > BOUND_BYTES) == (
            *(False, False),
            True,
        )
        assert process.metrics().value("rules_not_enforced") == 1
        write(process, make())
        until(lambda: process.log("configuration reloaded"), "it is loaded")
        assert process.metrics().value("rules_not_enforced") == 0
        reading = until_held(process, record, pool)
        write(process, make(enforce=False))
        reading.result(RELEASED_S)


def test_held_clients_are_let_through_by_a_command(
    make: Make, tmp_path: Path, record: str, pool: ThreadPoolExecutor
) -> None:
    with running(ProxyProcess(make(), tmp_path)) as process:
        reading = until_held(process, record, pool)
        code, out, _ = quota_proxy(
            *("pause", "--for", "1h", "--client-id", CLIENT, "--by", "anna"),
            *("--url", process.admin_url),
        )
        assert (code, f"paused: client-id={CLIENT} until" in out) == (0, True)
        reading.result(RELEASED_S)
        before = held(process)
        read(process, record)
        assert (held(process), above(process) >= 3) == (before, True)
        (line,) = process.logged("throttling paused")
        assert (line["selector"], line["by"]) == (f"client-id={CLIENT}", "anna")

        process.kill()
        process.start()
        assert process.metrics().value("throttling_paused") == 1
        read(process, record)
        assert held(process) == 0

        code, out, _ = quota_proxy("resume", "--url", process.admin_url)
        assert (code, out) == (0, "all quotas are enforced\n")
        assert process.metrics().value("throttling_paused") == 0
        until_held(process, record, pool)
        call(process, "POST", "/v1/throttling", {"off": "1h"})


def test_a_pause_and_an_override_end_by_themselves(make: Make, tmp_path: Path, record: str) -> None:
    with running(ProxyProcess(make(), tmp_path)) as process:
        call(process, "POST", "/v1/throttling", {"off": "2s"})
        body = {"consumer_byte_rate": "1GiB", "until": "2s"}
        assert call(process, "PUT", f"/v1/quotas/client-id={CLIENT}", body).status == 200
        read(process, record)
        assert held(process) == 0
        until(lambda: process.log("throttling resumed"), "the pause has ended")
        until(lambda: process.log("quota override ended"), "the override has ended")
        (entry,) = json.loads(process.get("/v1/quotas")[1])["quotas"]
        assert entry["source"] == "file"
        assert process.metrics().value("throttling_paused") == 0
