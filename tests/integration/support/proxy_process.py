"""The proxy as its users run it: a process of its own, a YAML file, a log, metrics over HTTP."""

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.forked import NONE, Constants, ForkedCommand, environment

HOST = "127.0.0.1"
PREFIX = "kafka_quota_proxy_"
WAIT_S = 120
START_TIMEOUT_S = 120
"""Until `ready`: its state may be in a Kafka that comes up only then."""
POLL_S = 0.02
"""Between two looks at a condition: it may be about anything, which tells nobody."""
LONGEST_POLL_S, POLL_GROWTH = 0.1, 1.2
"""A look may cost a scrape: what takes long is looked at less often."""


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Return the first true value of the condition; fail when there is none in time."""
    deadline, pause_s = time.monotonic() + timeout_s, POLL_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(pause_s * POLL_GROWTH, LONGEST_POLL_S)
    return value


RUN = """
import sys
from proxy import cli
sys.exit(cli.main())
"""


class Metrics:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    @property
    def samples(self) -> list[Sample]:
        """All there is."""
        return self._of("")

    def _of(self, start: str) -> list[Sample]:
        """Parse those only that begin so: waits look at one, again and again."""
        text = "\n".join(line for line in self._lines if line.startswith(start))
        return [each for family in text_string_to_metric_families(text) for each in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """Add up the samples of this name that have these labels."""
        name = PREFIX + name
        return sum(
            sample.value
            for sample in self._of(name)
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        """Give the values that a label has."""
        name = PREFIX + name
        return {each.labels[label] for each in self._of(name) if each.name == name}


class ProxyProcess:
    """`quota-proxy run`. `start` it; `stop` it in order, or `kill` it and `start` it again."""

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        arguments: Sequence[str] = (),
        *,
        anew: bool = False,
        changes: str = "",
        constants: Constants = NONE,
        errors: int | None = None,
    ) -> None:
        """`anew` starts a new Python, as its users do, instead of a fork of one.

        So do `changes`, which that Python executes first. `constants` are those of a fork, such as
        the interval between two looks at what does not change by itself here. `errors` is a
        descriptor that gets the log in place of a file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.config_file = folder / "proxy.yaml"
        self.log_file = folder / "proxy.log"
        self.config_file.write_text(yaml.safe_dump(config))
        self._command = ["run", "-c", str(self.config_file), "--log-format", "json", *arguments]
        self._program = ["-m", "proxy"] if anew else ["-c", changes + RUN] if changes else None
        self._constants = constants
        self._process: subprocess.Popen[bytes] | ForkedCommand | None = None
        self._output: TextIO | None = None
        self._log_start = 0
        self._errors = errors

    def start(self) -> "ProxyProcess":
        """Return when it says `ready`."""
        readable, writable = os.pipe()
        self._output = open(readable)  # noqa: SIM115, PTH123 - as long as the process
        with self.log_file.open("a") as log, open(writable) as output:  # noqa: PTH123
            self._log_start = log.tell()
            errors = log.fileno() if self._errors is None else self._errors
            if self._program is not None:
                self._process = subprocess.Popen(
                    [sys.executable, *self._program, *self._command],
                    stdout=output,
                    stderr=errors,
                    env=environment(),
                )
            else:
                self._process = ForkedCommand(
                    self._command, output.fileno(), errors, self._constants
                )
        said, _, _ = select.select([self._output], [], [], START_TIMEOUT_S)
        assert said, f"not ready in {START_TIMEOUT_S} s\n{self.log_file.read_text()}"
        line = self._output.readline()
        assert line == "ready\n", f"{line!r}\n{self.log_file.read_text()}"
        return self

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """Return its exit code when it has ended."""
        assert self._process is not None
        try:
            code = self._process.wait(WAIT_S)
        finally:
            self.kill()
        return code

    def stop(self) -> None:
        """End it in order, and require that it ran and ended without a fault of its own."""
        if self._process is not None:
            self.terminate()
            code = self.wait()
            self.check_log()
            assert code == 0, f"exit code {code}\n{self.log_file.read_text()}"

    def kill(self) -> None:
        """End it at once, as a crash does."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._output is not None:
            self._output.close()

    def check_log(self) -> None:
        """Require that the log is all JSON and tells of no fault of the proxy's own."""
        faults = [line for line in self.log_file.read_text().splitlines() if _is_fault(line)]
        assert not faults, "\n".join(faults)

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """Give the lines written since the latest start, all or those of one event."""
        text = self.log_file.read_text()[self._log_start :]
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [line for line in lines if event in (None, line["event"])]

    def logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """Wait for so many lines of one event since the latest start, and require that these are
        all. A line is written a little after it was logged.
        """
        found = until(
            lambda: len(lines := self.log(event)) >= count and lines, f"in the log: {event}"
        )
        assert len(found) == count, found
        return list(found)

    @property
    def bootstrap(self) -> str:
        """`HOST:PORT` of the first listener."""
        return self.bootstrap_of()

    def bootstrap_of(self, listener: str | None = None) -> str:
        """`HOST:PORT` of a listener."""
        line = next(x for x in self.log("listening") if listener in (None, x["listener"]))
        return f"{HOST}:{line['port']}"

    @property
    def port(self) -> int:
        """Bootstrap port of the first listener."""
        return int(self.bootstrap.rpartition(":")[2])

    @property
    def admin_url(self) -> str:
        """`http://HOST:PORT` of the admin server. Raises OSError while it is not up yet."""
        lines = self.log("admin")
        if not lines:
            raise ConnectionRefusedError("the admin server is not up yet")
        return f"http://{HOST}:{lines[0]['port']}"

    def get(self, path: str) -> tuple[int, str]:
        """Ask the admin server; return status and text."""
        url = f"{self.admin_url}{path}"
        try:
            with urllib.request.urlopen(url, timeout=WAIT_S) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> Metrics:
        """Scrape the metrics."""
        return Metrics(self.get("/metrics")[1])

    def until_counts(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has reached a value, and require that it is exactly that."""
        until(lambda: self.metrics().value(name, **labels) >= value, f"{name} {labels} = {value}")
        assert self.metrics().value(name, **labels) == value, f"{name} {labels}"


def _is_fault(line: str) -> bool:
    """Whether a line tells of a defect, or is what a library had to say."""
    if not line.startswith("{"):
        return True
    said = json.loads(line)
    return said["event"] == "unexpected error" or "logger" in said


LISTENER = {
    "name": "default",
    "bind": f"{HOST}:0",
    "advertised_host": HOST,
    "broker_ports": 0,
}
"""Listens on free ports."""


def config(
    bootstrap_servers: str,
    *,
    rules: Iterable[dict[str, Any]] = (),
    quotas: dict[str, Any] | None = None,
    throttle: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    listeners: Iterable[dict[str, Any]] = ({},),
    cluster_tls: dict[str, Any] | None = None,
    unknown_apis: str | None = None,
    queries: Iterable[dict[str, Any]] = (),
    progress: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
    admin_port: int = 0,
) -> dict[str, Any]:
    """Make a configuration whose sensors look back on one second instead of eleven.

    `listeners` are changes to LISTENER, in which None takes a key away.
    """
    cluster: dict[str, Any] = {"bootstrap_servers": bootstrap_servers.split(",")}
    if cluster_tls is not None:
        cluster["tls"] = cluster_tls
    if unknown_apis is not None:
        cluster["unknown_apis"] = unknown_apis
    return {
        "cluster": cluster,
        "listeners": [
            {key: value for key, value in ({**LISTENER, **own}).items() if value is not None}
            for own in listeners
        ],
        "quotas": {"window": "100ms", "samples": 11, "rules": list(rules), **(quotas or {})},
        "throttle": throttle or {},
        "limits": limits or {},
        "queries": list(queries),
        "progress": progress or {},
        "state": state or {"kind": "memory"},
        "admin": {"bind": f"{HOST}:{admin_port}"},
    }
