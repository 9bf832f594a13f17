"""A real Prometheus server that scrapes one proxy, and is asked in PromQL."""

import json
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.proxy_process import WAIT_S, until

from examples.devkit.loopback import HOST, free_ports
from examples.devkit.process import ServerProcess

JOB = "kafka-quota-proxy"
"""The name that the alert rules and the dashboard expect."""

INTERVAL = "1s"
STOP_TIMEOUT_S = 10

Series = tuple[dict[str, str], float]
"""Labels and value."""


def program(name: str) -> str:
    """Return the path of one of Prometheus' programs; without it the test fails."""
    path = shutil.which(name)
    if path is None:
        pytest.fail(f"{name} is missing: apt-get install prometheus")
    return path


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Ask its API; it must succeed."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{path} {parameters}: {error.read().decode()}")
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, promql: str, at_s: float | None = None) -> list[Series]:
        """Evaluate an expression, now or at a time since the epoch."""
        parameters = {} if at_s is None else {"time": str(at_s)}
        result = self.get("query", query=promql, **parameters)["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def value(self, promql: str, at_s: float | None = None) -> float:
        """Evaluate an expression that gives exactly one series."""
        found = self.query(promql, at_s)
        assert len(found) == 1, f"{promql}: {found}"
        return found[0][1]

    def until_scraped(self, after_s: float) -> None:
        """Wait for a scrape of the proxy that began after a time since the epoch."""
        promql = f'timestamp(up{{job="{JOB}"}}) and up == 1'
        until(lambda: any(at_s > after_s for _, at_s in self.query(promql)), "it is scraped")


@contextmanager
def watching(target: str, folder: Path, rules: Path) -> Iterator[Prometheus]:
    """Run a server that scrapes `target`, a `HOST:PORT`, and evaluates the rules."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": JOB, "static_configs": [{"targets": [target]}]}],
    }
    file = folder / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    (port,) = free_ports(1)
    server = ServerProcess(folder / "prometheus.log")
    server.spawn(
        [
            program("prometheus"),
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={HOST}:{port}",
        ]
    )
    try:
        url = f"http://{HOST}:{port}"
        until(lambda: _is_ready(server, url), f"Prometheus is ready: {folder}")
        yield Prometheus(url)
    finally:
        server.stop(STOP_TIMEOUT_S)


def _is_ready(server: ServerProcess, url: str) -> bool:
    assert server.exit_status is None, server.log_tail()
    try:
        with urllib.request.urlopen(f"{url}/-/ready", timeout=WAIT_S) as response:
            return bool(response.status == 200)
    except OSError:
        return False
