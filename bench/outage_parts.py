"""A Spark driver that tells all that its queries do."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from threading import Condition, Thread

from bench.lab import Lab
from bench.outage_driver import Start
from bench.processes import BenchError, Child, python
from examples.devkit.jars import connector_jars

READY_TIMEOUT_S = 90.0

Ranges = Mapping[int, tuple[int, int, int]]
"""By partition: the first offset, the last one, and how many there were."""


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

    @classmethod
    def begin(cls, lab: Lab, tasks: int) -> "Driver":
        """Start a Spark session with so many tasks at a time; return when it is ready."""
        jars = ",".join(str(jar) for jar in connector_jars())
        command = python("bench.outage_driver", f"--jars={jars}", f"--tasks={tasks}")
        driver = cls(lab.start("driver", command))
        driver.child.wait_line(lambda line: line == "ready", READY_TIMEOUT_S)
        Thread(target=driver._take_all, name="driver-events", daemon=True).start()
        return driver

    def start(self, run: Start) -> None:
        """Begin a run of a query."""
        self.child.send_line(json.dumps(asdict(run)))

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
