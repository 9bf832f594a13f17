"""Machines under test: `quota-proxy run` on ports of its own, killed, frozen, drained."""

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

from bench.processes import BenchError, python
from examples.devkit.loopback import HOST
from examples.devkit.process import ServerProcess

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
ADMIN_TIMEOUT_S = 2.0
POLL_S = 0.02
READY_LINE = b"ready\n"
WORKER_SERVES, RELOADED = b'"event": "worker serves"', b'"event": "configuration reloaded"'
BROKER_PORTS = 2
"""For each worker: of the only broker, whose id is 1, and the one before it."""

_BYTES = re.compile(r"^kafka_quota_proxy_bytes_total\{(.*)\} (\S+)$", re.MULTILINE)


class Machine:
    """One machine: a launcher and its workers, or a single process.

    `ports` are its bootstrap port, its admin port, one more for each worker, which other members
    ask, and those of the brokers from there on.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        cluster: str,
        rules: Sequence[Mapping[str, object]],
        ports: range,
        settings: Mapping[str, object],
    ) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self.admin_port = ports[:2]
        self.broker_ports = ports[2 + len(ports[2:]) // (1 + BROKER_PORTS) :]
        first, last = self.broker_ports[0], self.broker_ports[-1]
        self.bootstrap = f"{HOST}:{self.port}"
        self.admin_url = f"http://{HOST}:{self.admin_port}"
        self._config = folder / f"{name}.yaml"
        log = folder / f"{name}.log"
        log.touch()
        self._log, self._server = log, ServerProcess(log)
        listener = {
            "name": "bench",
            "bind": self.bootstrap,
            "advertised_host": HOST,
            "broker_ports": f"{first}-{last}",
        }
        self._document: dict[str, object] = {
            "cluster": {"bootstrap_servers": [cluster]},
            "listeners": [listener],
            "quotas": {"rules": list(rules)},
            "admin": {"bind": f"{HOST}:{self.admin_port}"},
            **settings,
        }
        self._write()
        self._before = 0
        self._begun_s = 0.0

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self._server.pid is not None

    def await_ready(self) -> None:
        """Return when it serves.

        Raises BenchError when it does not within READY_TIMEOUT_S.
        """
        while READY_LINE not in self._logged():
            is_late = time.monotonic() - self._begun_s > READY_TIMEOUT_S
            if self._server.wait(POLL_S) or is_late:
                self.kill()
                raise BenchError(f"{self.name} did not start; its log ends:\n{self.log_tail()}")

    def start(self) -> None:
        """Start it; see `await_ready`."""
        self.begin()
        self.await_ready()

    def kill(self) -> None:
        """End all its processes at once (SIGKILL), as when the machine is gone."""
        processes = self.processes()
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        self._server.kill()
        psutil.wait_procs(processes, STOP_TIMEOUT_S)

    def drain(self) -> None:
        """Ask it to end (SIGTERM), and wait for that."""
        self._server.stop(STOP_TIMEOUT_S)

    def worker_pids(self) -> dict[int, int]:
        """Return the latest process of each worker, by its number."""
        *whole, _ = self._logged().split(b"\n")
        told = (json.loads(line) for line in whole if WORKER_SERVES in line)
        return {line["worker"]: line["process"] for line in told}

    def kill_worker(self, number: int = 0) -> None:
        """End one of its workers at once (SIGKILL), if it is there."""
        with suppress(ProcessLookupError):
            os.kill(self.worker_pids()[number], signal.SIGKILL)

    def kill_worker_again_and_again(self, number: int, duration_s: float) -> None:
        """End a worker, and each that takes its place, as soon as it serves."""
        end_s, killed = time.monotonic() + duration_s, 0
        while time.monotonic() < end_s:
            pid = self.worker_pids()[number]
            if pid != killed:
                killed = pid
                self.kill_worker(number)
            time.sleep(POLL_S)

    def reload(self, rules: Sequence[Mapping[str, object]]) -> None:
        """Put other rules in force (SIGHUP); raise BenchError when they are not taken."""
        assert self._server.pid is not None
        self._document["quotas"] = {"rules": list(rules)}
        self._write()
        before = self._logged().count(RELOADED)
        os.kill(self._server.pid, signal.SIGHUP)
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while self._logged().count(RELOADED) == before:
            if time.monotonic() > deadline_s:
                raise BenchError(f"{self.name} did not reload:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def replace(self) -> None:
        """Start another of it that takes its place (`--take-over`), and wait until it has ended."""
        old, self._server = self._server, ServerProcess(self._log)
        try:
            self.begin("--take-over", str(old.pid))
            self.await_ready()
            if not old.wait(STOP_TIMEOUT_S):
                raise BenchError(f"{self.name} does not end:\n{self.log_tail()}")
        finally:
            old.kill()

    def begin(self, *options: str) -> None:
        """Start it and return at once."""
        self._before = self._log.stat().st_size
        self._begun_s = time.monotonic()
        self._server.spawn(python("proxy", "run", "-c", str(self._config), *options))

    def _write(self) -> None:
        self._config.write_text(yaml.safe_dump(self._document, sort_keys=False))

    def _logged(self) -> bytes:
        """Return what it has logged since its latest start."""
        with self._log.open("rb") as log:
            log.seek(self._before)
            return log.read()

    def freeze(self) -> None:
        """Stop all its processes where they are (SIGSTOP)."""
        for process in self.processes():
            process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Have them go on (SIGCONT)."""
        for process in reversed(self.processes()):
            process.send_signal(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """Return its processes, the first one first."""
        pid = self._server.pid
        if pid is None:
            return []
        with suppress(psutil.Error):
            first = psutil.Process(pid)
            return [first, *first.children(recursive=True)]
        return []

    def carried(self, client_id: str) -> Mapping[str, float]:
        """Return a client's bytes of Fetch responses by member.

        Raises OSError, as when the machine is down.
        """
        connection = http.client.HTTPConnection(HOST, self.admin_port, timeout=ADMIN_TIMEOUT_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        except http.client.HTTPException as error:
            raise OSError(f"{self.name}: {error}") from error
        finally:
            connection.close()
        found: dict[str, float] = {}
        for labels, value in _BYTES.findall(text):
            named = dict(part.split("=", 1) for part in labels.split(","))
            if named["api"] == '"Fetch"' and named["client_id"] == f'"{client_id}"':
                member = named["member"].strip('"')
                found[member] = found.get(member, 0.0) + float(value)
        return found

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._server.log_tail()
