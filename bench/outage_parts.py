"""What outages are made with: proxies that come back at their address, a driver that tells all."""

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Condition, Thread

import yaml

from bench.lab import READY_TIMEOUT_S
from bench.outage_driver import Start
from bench.processes import BenchError, Child, python
from examples.devkit.loopback import HOST, free_ports
from examples.devkit.process import ServerProcess

READY_LINE = b"ready\n"
POLL_S = 0.01

Ranges = Mapping[int, tuple[int, int, int]]
"""By partition: the first offset, the last one, and how many there were."""


class LastingProxy:
    """`quota-proxy run` with a state that lasts, on ports of its own.

    It may be killed and started again from any thread.
    """

    def __init__(self, folder: Path, bootstrap: str, rules: Sequence[object]) -> None:
        folder.mkdir()
        port, admin_port, first, last = free_ports(4)
        self.bootstrap = f"{HOST}:{port}"
        self.admin_url = f"http://{HOST}:{admin_port}"
        self._config = folder / "proxy.yaml"
        self._log = folder / "proxy.log"
        self._server = ServerProcess(self._log)
        listener = {
            "name": "bench",
            "bind": self.bootstrap,
            "advertised_host": HOST,
            "broker_ports": f"{first}-{last}",
        }
        document = {
            "cluster": {"bootstrap_servers": [bootstrap]},
            "listeners": [listener],
            "quotas": {"rules": list(rules)},
            "state": {"kind": "sqlite", "path": str(folder / "state.db")},
            "admin": {"bind": f"{HOST}:{admin_port}"},
        }
        self._config.write_text(yaml.safe_dump(document, sort_keys=False))

    def start(self) -> None:
        """Return when it serves; raise BenchError when it does not within READY_TIMEOUT_S."""
        before = self._log.stat().st_size if self._log.exists() else 0
        self._server.spawn(python("proxy", "run", "-c", str(self._config)))
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while READY_LINE not in self._log.read_bytes()[before:]:
            if self._server.wait(POLL_S) or time.monotonic() > deadline_s:
                self.kill()
                raise BenchError(f"proxy did not start; its log ends:\n{self._server.log_tail()}")

    def kill(self) -> None:
        """End it at once, as a crash does (SIGKILL)."""
        self._server.kill()


@dataclass(frozen=True, slots=True)
class Event:
    """What the driver told of one query; see `outage_driver`."""

    kind: str
    at_s: float
    batch: int
    ends: Mapping[int, int]
    """By partition, the offset up to which the batch was planned."""
    ranges: Ranges
    error: str | None


@dataclass(slots=True)
class Driver:
    """A running `outage_driver`, and all that it has told."""

    child: Child
    _events: dict[str, list[Event]] = field(default_factory=dict)
    _changed: Condition = field(default_factory=Condition)
    _is_over: bool = False

    def listen(self) -> None:
        """Begin to take in events."""
        Thread(target=self._take_all, name="driver-events", daemon=True).start()

    def start(self, run: Start) -> None:
        """Begin a run of a query."""
        self.child.send_line(json.dumps(asdict(run)))

    def stop(self, name: str) -> None:
        """Stop the run of a query in order."""
        self.child.send_line(json.dumps({"stop": name}))

    def kill(self) -> None:
        """End it and its JVM at once (SIGKILL)."""
        os.killpg(self.child.process.pid, signal.SIGKILL)
        self.child.process.wait()

    def events(self, name: str, kind: str | None = None) -> list[Event]:
        """Return what was told of a query so far, all or one kind, in order."""
        with self._changed:
            told = list(self._events.get(name, ()))
        return [event for event in told if kind in (None, event.kind)]

    def wait(
        self, name: str, condition: Callable[[list[Event]], bool], timeout_s: float, since: int = 0
    ) -> bool:
        """Wait until the events of a query from number `since` on are so; False when in vain.

        Raises BenchError when the driver has ended.
        """
        with self._changed:
            met = self._changed.wait_for(
                lambda: self._is_over or condition(self._events.get(name, [])[since:]), timeout_s
            )
            if self._is_over:
                raise BenchError(f"the driver ended too early{self.child.log_tail()}")
        return met

    def _take_all(self) -> None:
        stdout = self.child.process.stdout
        assert stdout is not None
        for line in stdout:
            if not line.startswith(b"{"):
                continue
            told = json.loads(line)
            event = Event(
                told["event"],
                told["at_s"],
                told.get("batch", -1),
                {int(key): value for key, value in told.get("ends", {}).items()},
                {int(key): tuple(value) for key, value in told.get("ranges", {}).items()},
                told.get("error"),
            )
            with self._changed:
                self._events.setdefault(told["query"], []).append(event)
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
