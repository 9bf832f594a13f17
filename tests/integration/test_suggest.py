"""Before a real broker: what was seen of clients becomes rules that the proxy takes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.operating import quota_proxy, running
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, fetch

from examples.devkit.broker import EmbeddedBroker

RECORD_BYTES = 500_000
SEEN_WITHIN_S = 40
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
