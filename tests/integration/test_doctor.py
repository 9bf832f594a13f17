"""`quota-proxy doctor` with a real proxy, broker and Spark: a sound query, and broken ones."""

import json
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from parts.attached import attaching
from pyspark.sql import SparkSession
from support.machine import in_tier
from support.operating import quota_proxy, running
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, api_versions
from support.streams import Stream

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener

NAME = "orders"
RULES = [
    {"client-id": NAME, "consumer_byte_rate": "10MiB", "adaptive": {}},
    {"client-id": "<default>", "scope": "shared", "consumer_byte_rate": "50MiB"},
]
QUERIES = [{"name": NAME, "commit_group": "orders-progress"}]
END_S = 120


class Clinic:
    """A proxy with tokens, and what `doctor` says of a query of it."""

    def __init__(self, process: ProxyProcess, folder: Path) -> None:
        self.process = process
        self.folder = folder

    @property
    def token(self) -> str:
        """The one of drivers."""
        return (self.folder / "spark-token").read_text()

    def ask(self, *options: object, name: str = NAME) -> tuple[int, dict[str, str], str]:
        """Give the exit code, what is WRONG by its check with the fix, and the whole output."""
        url = ("--url", self.process.admin_url)
        file = self.process.config_file
        code, out, err = quota_proxy("doctor", name, "-c", file, *url, *options)
        assert err == ""
        wrong: dict[str, str] = {}
        lines = out.splitlines()
        for line, below in pairwise(lines):
            if line.startswith("WRONG"):
                check = line.removeprefix("WRONG").strip().partition("  ")[0]
                wrong[check] = line + below
                assert "fix: " in below
        assert out.endswith(
            f"{name}: {len(wrong)} to mend\n" if wrong else f"{name}: nothing is wrong\n"
        )
        return code, wrong, out


@pytest.fixture
def clinic(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., Clinic]]:
    """`clinic(**parts of the configuration)`."""
    with ExitStack() as stack:

        def start(workers: int = 1, **parts: Any) -> Clinic:
            folder = tmp_path / "proxy"
            folder.mkdir()
            for name in ("admin-token", "spark-token"):
                (folder / name).write_text(f"{name}-secret\n")
                (folder / name).chmod(stat.S_IRUSR)
            made = config(kafka.bootstrap, **{"rules": RULES, "queries": QUERIES, **parts})
            made["admin"] |= {
                "token_file": "admin-token",
                "tokens": [{"name": "spark", "token_file": "spark-token", "rights": ["report"]}],
            }
            made["workers"] = workers
            process = ProxyProcess(in_tier(made) if workers > 1 else made, folder)
            return Clinic(stack.enter_context(running(process)), folder)

        yield start


@pytest.fixture
def listen_with_token(spark: SparkSession) -> Iterator[Callable[[Clinic, str], QuotaListener]]:
    with attaching(spark) as attach:
        yield lambda clinic, token: attach(QuotaListener(clinic.process.admin_url, token=token))


def batches(clinic: Clinic) -> int:
    queries = json.loads(clinic.process.get("/v1/progress")[1])["queries"]
    return max((each["run_batches"] for each in queries), default=0)


@pytest.mark.slow
def test_a_query_that_is_well_and_then_is_not(
    clinic: Callable[..., Clinic],
    listen_with_token: Callable[[Clinic, str], QuotaListener],
    stream: Callable[..., Stream],
    topic: Callable[..., str],
) -> None:
    """One Spark query: first nothing is wrong, then its trigger does not fit the rule."""
    seen, origin = clinic(), topic(2)
    listen_with_token(seen, seen.token)
    query = stream(seen.process, NAME, origin)
    query.feed(50, 100)
    query.start("500 milliseconds")
    until(lambda: batches(seen), "a batch is reported", END_S)
    until(lambda: seen.ask()[:2] == (0, {}), "nothing is wrong", END_S)
    out = seen.ask()[2]
    for said in (
        "rule 0 (",
        "10MiB per second, and fits its batches to its trigger",
        "queries names it; what it completes is committed to orders-progress",
        f"a report with the token in {seen.folder / 'spark-token'} is taken",
        f"{seen.process.bootstrap} answers, and so do {HOST}:",
        f"the cluster has {origin!r}",
        "its listener reports: ",
        "processing_time every 0.5 s goes with its rule",
    ):
        assert said in out
    assert "not checked" not in out

    text = seen.process.config_file.read_text().replace(
        "adaptive: {}", "adaptive: {batch_interval: 3s}"
    )
    seen.process.config_file.write_text(text)
    until(lambda: len(seen.process.log("configuration reloaded")) == 1, "it is loaded")
    done = batches(seen)
    query.feed(50, 100)
    until(lambda: batches(seen) > done, "a further batch is reported", END_S)
    until(lambda: set(seen.ask()[1]) == {"trigger"}, "its trigger is wrong", END_S)
    code, wrong, _ = seen.ask()
    assert code == 1
    assert "batch_interval: 0.5s" in wrong["trigger"]


@pytest.mark.slow
def test_a_query_whose_listener_has_the_wrong_token(
    clinic: Callable[..., Clinic],
    listen_with_token: Callable[[Clinic, str], QuotaListener],
    stream: Callable[..., Stream],
    topic: Callable[..., str],
    tmp_path: Path,
) -> None:
    seen, origin = clinic(), topic(1)
    wrong_token = tmp_path / "wrong-token"
    wrong_token.write_text("none of the proxy's\n")
    listener = listen_with_token(seen, wrong_token.read_text())
    query = stream(seen.process, NAME, origin)
    query.feed(5, 100, [0])
    query.start("500 milliseconds")
    until(lambda: listener.refused > 0, "a report is refused", END_S)
    until(lambda: query.batches, "a batch is read", END_S)
    code, wrong, _ = seen.ask("--topic", origin)
    assert (code, set(wrong)) == (1, {"reports"})
    code, wrong, _ = seen.ask("--topic", origin, "--token-file", wrong_token)
    assert (code, set(wrong)) == (1, {"token", "reports"})
    assert f"{wrong_token}: the token is wrong" in wrong["token"]
    code, wrong, _ = seen.ask("--token-file", seen.folder / "spark-token")
    assert set(wrong) == {"reports"}


def test_a_query_that_never_came(clinic: Callable[..., Clinic], topic: Callable[..., str]) -> None:
    seen = clinic()
    code, wrong, out = seen.ask("--topic", "no-such-topic")
    assert (code, set(wrong)) == (1, {"topic", "client", "reports"})
    assert "has no topic 'no-such-topic'" in wrong["topic"]
    assert "kafka.client.id 'orders'" in wrong["client"]
    assert "QuotaListener" in wrong["reports"]
    reports = seen.process.metrics()
    assert reports.value("spark_reports_total", result="malformed") == 0, "a probe is no report"
    assert reports.labels("build_info", "version") != set()
    assert "'quota_listener'" not in out
    code, wrong, _ = seen.ask("--topic", topic())
    assert (code, set(wrong)) == (1, {"client", "reports"})


def test_a_machine_with_workers_answers_as_one_proxy(
    clinic: Callable[..., Clinic], topic: Callable[..., str]
) -> None:
    seen = clinic(workers=2)
    code, wrong, out = seen.ask("--topic", topic())
    assert (code, set(wrong)) == (1, {"client", "reports"})
    assert "a report with the token in " in out
    assert f"{seen.process.bootstrap} answers, and so do {HOST}:" in out
    (version,) = seen.process.metrics().labels("build_info", "version")
    assert f"version {version}" in out


def test_names_that_are_almost_the_same(clinic: Callable[..., Clinic]) -> None:
    """The query is `Orders`: rule, queries and client each say something else."""
    rules = [{"client-id": "orders-", "consumer_byte_rate": "1MiB"}]
    seen = clinic(rules=rules, queries=[])
    with RawClient(seen.process.bootstrap, "orders") as client:
        client.ask(api_versions(3))
        code, wrong, _ = seen.ask(name="Orders")
    assert (code, set(wrong)) == (1, {"rule", "queries", "client", "reports"})
    assert "one names 'orders-'" in wrong["rule"]
    assert "'orders' is" in wrong["client"]


def test_a_proxy_that_does_not_run(clinic: Callable[..., Clinic]) -> None:
    seen = clinic()
    url = seen.process.admin_url
    seen.process.stop()
    file = seen.process.config_file
    code, out, err = quota_proxy("doctor", NAME, "-c", file, "--url", url)
    assert (code, err) == (1, "")
    (line,) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert f"{url} does not answer" in line
    assert out.endswith("orders: 1 to mend\n")


def test_a_listener_that_tells_clients_a_wrong_address(clinic: Callable[..., Clinic]) -> None:
    seen = clinic(listeners=[{"advertised_host": "no-such-host.invalid"}])
    code, wrong, _ = seen.ask()
    assert (code, "listener default" in wrong) == (1, True)
    assert "no-such-host.invalid" in wrong["listener default"]
    assert "advertised_host" in wrong["listener default"]


def test_the_file_of_another_proxy(clinic: Callable[..., Clinic], tmp_path: Path) -> None:
    seen = clinic()
    other = yaml.safe_load(seen.process.config_file.read_text())
    other["quotas"]["rules"][1]["client-id"] = "reports"
    file = seen.folder / "other.yaml"
    file.write_text(yaml.safe_dump(other))
    url = seen.process.admin_url
    code, out, _ = quota_proxy("doctor", NAME, "-c", file, "--url", url)
    assert code == 1
    assert "has other rules than this file" in out


def test_a_file_with_mistakes_after_the_start(clinic: Callable[..., Clinic]) -> None:
    seen = clinic()
    good = seen.process.config_file.read_text()
    seen.process.config_file.write_text("cluster: [")
    until(lambda: seen.process.log("configuration not reloaded, the old one stays"), "refused")
    code, _, err = quota_proxy("doctor", NAME, "-c", seen.process.config_file)
    assert code == 2
    assert "proxy.yaml:1" in err
    (seen.folder / "good.yaml").write_text(good)
    url = seen.process.admin_url
    code, out, _ = quota_proxy("doctor", NAME, "-c", seen.folder / "good.yaml", "--url", url)
    assert code == 1
    assert "was not loaded again: " in out


def test_bad_usage(clinic: Callable[..., Clinic], tmp_path: Path) -> None:
    code, _, err = quota_proxy("doctor", NAME)
    assert (code, "--config" in err) == (2, True)
    code, _, err = quota_proxy("doctor", NAME, "-c", tmp_path / "none.yaml")
    assert (code, "does not exist" in err) == (2, True)
    seen = clinic()
    code, _, err = quota_proxy("doctor", NAME, "-c", seen.process.config_file)
    assert (code, "give the address as --url" in err) == (2, True)
    token = ("--url", seen.process.admin_url, "--token-file", tmp_path / "none")
    code, _, err = quota_proxy("doctor", NAME, "-c", seen.process.config_file, *token)
    assert (code, f"--token-file {tmp_path / 'none'}: " in err) == (2, True)
    for name in ("", "a b", "x" * 40_000):
        code, _, err = quota_proxy("doctor", NAME, "-c", seen.process.config_file, "--topic", name)
        assert (code, "is no name" in err) == (2, True)


def test_where_reading_needs_a_token_the_configuration_s_own_is_shown(
    kafka: EmbeddedBroker, clinic: Callable[..., Clinic]
) -> None:
    seen = clinic()
    text = seen.process.config_file.read_text()
    seen.process.stop()
    changed = yaml.safe_load(text)
    changed["admin"]["read_needs_token"] = True
    seen.process.config_file.write_text(yaml.safe_dump(changed))
    seen.process.start()
    until(lambda: seen.process.get("/readyz")[0] == HTTPStatus.OK, "it is ready")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{seen.process.admin_url}/v1/status")
    _, wrong, _ = seen.ask()
    assert set(wrong) == {"client", "reports"}
