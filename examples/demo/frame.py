"""What is around every scenario: its folders and jars, a broker and a proxy, the pace."""

import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from kafka import KafkaAdminClient
from rich.console import Console

from examples.demo import CHECKOUT, DemoError
from examples.demo.children import Child
from examples.demo.screen import Screen
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.command import stop_signals_interrupt
from examples.devkit.jars import KAFKA_VERSION, connector_jars, kafka_jars

HOST = "127.0.0.1"
PROXY_TIMEOUT_S = 20.0
READY_LINE = "ready"
LOOK_INTERVAL_S = 1.0
"""Between two looks at the proxy: what is shown and drawn is by the second."""

_BOOTSTRAP = re.compile(r"^(\s*bootstrap_servers:).*$", re.MULTILINE)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a scenario takes place."""

    screen: Screen
    work_dir: Path
    """For what is of no use afterwards; it goes with the demo."""
    out_dir: Path
    """For the picture, the proxy's configuration and the logs."""

    def start(self, title: str, module: str, *words: str, **options: object) -> Child:
        """Start a module of the demo, which gets its options as one JSON object."""
        arguments = [*words, json.dumps(options)]
        return Child(title, f"examples.demo.{module}", arguments, self.out_dir)


@dataclass(frozen=True, slots=True)
class Scenario(Generic[R]):
    """What is shown."""

    out_dir: Path
    picture: str
    """File name."""
    measure: Callable[[Frame, int | None, bool], R]
    """Runs it, with the other arguments of `run_demo`; raises one of the kinds of `DevkitError`."""
    draw: Callable[[R, Path], None]
    conclude: Callable[[Console, R], int]
    """Says what was seen; returns the exit code."""

    def run(self, megabytes: int | None, brief: bool) -> int:
        """Run it from the first step to the last line; as `examples.demo.run_demo`."""
        started_s, out_dir = time.monotonic(), self.out_dir.resolve()
        with stop_signals_interrupt(), framed(out_dir) as frame:
            outcome = self.measure(frame, megabytes, brief)
            self.draw(outcome, out_dir / self.picture)
            code = self.conclude(frame.screen.console, outcome)
        frame.screen.step(f"Plot: {out_dir / self.picture}")
        frame.screen.step(f"Configuration and logs: {out_dir}")
        frame.screen.step(f"Took {time.monotonic() - started_s:.0f} s.")
        return code


@dataclass(frozen=True, slots=True)
class Servers:
    """What the demo's clients talk to."""

    broker: str
    """`HOST:PORT`."""
    proxy: Child
    bootstrap: str
    """`HOST:PORT` of the proxy."""
    admin_url: str


class Pace:
    """Waits between looks, which are a second apart however long a look takes.

    `clock_s` gives a monotonic time, `sleep` waits for 0 or more; both in seconds.
    """

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock_s = clock_s
        self._sleep = sleep
        self._due_s = clock_s()

    def wait(self) -> None:
        """Return when the next look is due: at once after one that took too long."""
        now_s = self._clock_s()
        self._due_s = max(self._due_s + LOOK_INTERVAL_S, now_s)
        self._sleep(self._due_s - now_s)


@contextmanager
def framed(out_dir: Path) -> Iterator[Frame]:
    """Prepare all that a scenario needs; raises one of the kinds of `DevkitError`."""
    screen = Screen(Console())
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"The demo can't write to {out_dir}: {error}",
            "Run it from a folder that you may write to.",
        ) from error
    screen.step(
        f"Jars of Kafka {KAFKA_VERSION} and of Spark's connector (cached after a first run)"
    )
    for title, jars in (("Kafka", kafka_jars), ("connector", connector_jars)):
        with screen.progress(f"downloading {title}") as report:
            jars(lambda done, found, _name: report(done, found))
    # Spark's JVM may still write into the folder when it is removed after a failure.
    with tempfile.TemporaryDirectory(
        prefix="quota-proxy-demo-", ignore_cleanup_errors=True
    ) as work_dir:
        yield Frame(screen, Path(work_dir), out_dir)


@contextmanager
def servers(frame: Frame, example: str, prepare: Callable[[str], None]) -> Iterator[Servers]:
    """Run a broker, and a proxy with the example of that name in front of it.

    `prepare` gets the broker's address before the proxy starts, to make topics. Raises one of the
    kinds of `DevkitError`.
    """
    frame.screen.step("Kafka broker starts")
    with EmbeddedBroker(frame.work_dir / "broker") as broker:
        prepare(broker.bootstrap)
        # With the broker's address in it, so that users can look at what ran.
        text = (CHECKOUT / "examples" / example).read_text(encoding="utf-8")
        config = frame.out_dir / example
        config.write_text(_BOOTSTRAP.sub(rf"\1 [{broker.bootstrap}]", text), encoding="utf-8")
        frame.screen.step(f"Proxy starts with {config}")
        with Child("proxy", "proxy", ["run", "--config", str(config)], frame.out_dir) as proxy:
            proxy.wait_for(
                lambda: READY_LINE in proxy.lines() or None, "opened its ports", PROXY_TIMEOUT_S
            )
            ports = {line.get("event"): line.get("port") for line in proxy.objects()}
            admin_url = f"http://{HOST}:{ports['admin']}"
            yield Servers(broker.bootstrap, proxy, f"{HOST}:{ports['listening']}", admin_url)


def make_topics(bootstrap: str, names: Sequence[str], partitions: int) -> None:
    """Create topics on one broker; raises KafkaError."""
    admin = KafkaAdminClient(bootstrap_servers=bootstrap)
    form = {"num_partitions": partitions, "replication_factor": 1}
    try:
        admin.create_topics(dict.fromkeys(names, form), wait_for_metadata=True)
    finally:
        admin.close()
