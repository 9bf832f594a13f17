"""What is around every demo: its folders and jars, a broker and a proxy, the last lines."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from proxy.demo import DemoError
from proxy.demo.children import Child
from proxy.demo.parts import Addresses, await_proxy, start_proxy, write_config
from proxy.demo.screen import Screen
from proxy.devkit.broker import EmbeddedBroker
from proxy.devkit.command import stop_signals_interrupt
from proxy.devkit.jars import KAFKA_VERSION, connector_jars, kafka_jars


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a demo takes place."""

    screen: Screen
    work_dir: Path
    """For what is of no use afterwards; it goes with the demo."""
    out_dir: Path
    """For the picture, the proxy's configuration and the logs."""


@dataclass(frozen=True, slots=True)
class Servers:
    """What the demo's clients talk to."""

    broker: str
    """`HOST:PORT`."""
    proxy: Child
    addresses: Addresses
    """Of the proxy."""


@contextmanager
def framed(out_dir: Path, picture: str) -> Iterator[Frame]:
    """Prepare all that a demo needs; when it has gone well say where `picture` is, and the rest.

    Raises one of the kinds of `DevkitError`.
    """
    started_s = time.monotonic()
    screen = Screen(Console())
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(
            f"The demo can't write to {out_dir}: {error}",
            "Run it from a folder that you may write to.",
        ) from error
    with stop_signals_interrupt():
        _fetch_jars(screen)
        # Spark's JVM may still write into the folder when it is removed after a failure.
        with tempfile.TemporaryDirectory(
            prefix="quota-proxy-demo-", ignore_cleanup_errors=True
        ) as work_dir:
            yield Frame(screen, Path(work_dir), out_dir)
    screen.step(f"Plot: {out_dir / picture}")
    screen.step(f"Configuration and logs: {out_dir}")
    screen.step(f"Took {time.monotonic() - started_s:.0f} s.")


@contextmanager
def servers(frame: Frame, example: str, prepare: Callable[[str], None]) -> Iterator[Servers]:
    """Run a broker, and a proxy with the example of that name in front of it.

    `prepare` gets the broker's address before the proxy starts, to make topics.
    """
    frame.screen.step("Kafka broker starts")
    with EmbeddedBroker(frame.work_dir / "broker") as broker:
        prepare(broker.bootstrap)
        config = frame.out_dir / example
        write_config(broker.bootstrap, config, example)
        frame.screen.step(f"Proxy starts with {config}")
        with start_proxy(config, frame.out_dir) as proxy:
            yield Servers(broker.bootstrap, proxy, await_proxy(proxy))


def _fetch_jars(screen: Screen) -> None:
    """Fetch the jars that are not cached, and show how far that is."""
    screen.step(
        f"Jars of Kafka {KAFKA_VERSION} and of Spark's connector (cached after a first run)"
    )
    for title, jars in (("Kafka", kafka_jars), ("connector", connector_jars)):
        with screen.progress(f"downloading {title}") as report:
            jars(lambda done, found, _name: report(done, found))
