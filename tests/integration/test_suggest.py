"""Before a real broker: what was seen of clients becomes rules that the proxy takes."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from proxy.admin.rates.observed_rates import OBSERVED_INTERVAL_MS
from support.machine import machine_config
from support.operating import call, quota_proxy, running
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, fetch

from examples.devkit.broker import EmbeddedBroker
from metrics.clock import MS_PER_SECOND

RECORD_BYTES = 500_000
SEEN_WITHIN_S, MEMBERS = 40, 3
"""Two samples are needed."""

EXECUTOR = "consumer-spark-kafka-source-92017897-daab-4d28-a2d5-5cc4133bee8f-1-executor-{}"


@pytest.mark.slow
def test_rules_are_suggested_for_who_has_none_and_outlive_a_restart(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    topic: Callable[..., str],
    fill: Callable[..., None],
) -> None:
    name = topic()
    fill(name, 1, RECORD_BYTES)
    state = {"kind": "sqlite", "path": str(tmp_path / "state.db")}
    document = config(kafka.bootstrap, state=state)

    def suggested(process: ProxyProcess) -> list[dict[str, object]]:
        code, out, _ = quota_proxy("suggest", "--since", "1h", "--url", process.admin_url)
        assert code == 0
        found: list[dict[str, object]] = yaml.safe_load(out)["quotas"]["rules"]
        return found

    with running(ProxyProcess(document, tmp_path / "one")) as process:

        def read() -> list[dict[str, object]]:
            for client_id in ("etl", EXECUTOR.format(1), EXECUTOR.format(2)):
                with RawClient(process.bootstrap, client_id) as client:
                    client.ask(fetch(12, name))
            return suggested(process)

        rules = until(lambda: len(found := read()) == 2 and found, "both are seen", SEEN_WITHIN_S)
        assert [set(rule) for rule in rules] == [
            {"client-id-prefix", "scope", "consumer_byte_rate"},
            {"client-id", "consumer_byte_rate"},
        ]
        assert rules[0]["client-id-prefix"] == "consumer-spark-kafka-source-"
        process.stop()
        process.start()
        again = until(lambda: suggested(process), "they are read from the state", SEEN_WITHIN_S)
        assert [rule.get("client-id") for rule in again] == [None, "etl"]

    file = tmp_path / "with-rules.yaml"
    file.write_text(yaml.safe_dump({**document, "quotas": {"rules": again}}))
    code, out, _ = quota_proxy("check", "-c", file, "--client-id", "etl")
    assert (code, "rules: 2" in out) == (0, True)
    assert "applies to client-id=etl" in out


@pytest.mark.slow
def test_what_was_kept_counts_once_whoever_has_read_it(
    kafka: EmbeddedBroker,
    tmp_path: Path,
    topic: Callable[..., str],
    fill: Callable[..., None],
) -> None:
    """Of several members one keeps what it has observed, which all of them can read."""
    name = topic()
    fill(name, 1, RECORD_BYTES)
    client_ids = [f"c{number}" for number in range(2 * MEMBERS)]

    def observed(process: ProxyProcess) -> dict[str, int]:
        found = call(process, "GET", "/v1/suggestions").document["clients"]
        return {each["example"]: each["quotas"][0]["total_bytes"] for each in found}

    def read(process: ProxyProcess) -> dict[str, int]:
        for client_id in client_ids:
            with RawClient(process.bootstrap, client_id) as client:
                client.ask(fetch(12, name))
        return observed(process)

    with running(ProxyProcess(machine_config(kafka.bootstrap, MEMBERS), tmp_path)) as process:
        until(lambda: len(read(process)) == len(client_ids), "all are seen", SEEN_WITHIN_S)
        time.sleep(2 * OBSERVED_INTERVAL_MS / MS_PER_SECOND)  # the last of it is seen, too
        before = observed(process)
        process.stop()
        process.start()
        until(lambda: observed(process), "it is read from the state", SEEN_WITHIN_S)
        time.sleep(OBSERVED_INTERVAL_MS / MS_PER_SECOND)
        after = observed(process)
    assert all(before[client_id] >= count for client_id, count in after.items())
