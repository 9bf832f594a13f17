"""What the integration tests share: proxies that are started, and in the end judged, for a test."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from parts.attached import attaching
from support.forked import NONE, Constants
from support.proxy_process import ProxyProcess, config
from support.streams import LOSS, Stream

LOG_LINES = 40
"""Of each proxy, shown of a test that fails."""

DATA_PATHS = {"splice": (), "copy": ("--no-splice",)}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show with a failure what the proxies in the test's folder logged last."""
    report: Any = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for file in sorted(folder.rglob("proxy.log")):
            lines = file.read_text().splitlines()[-LOG_LINES:]
            report.sections.append((f"{file.relative_to(folder)}", "\n".join(lines)))
    return report


@pytest.fixture
def proxy(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., ProxyProcess]]:
    """`proxy(*arguments, bootstrap_servers=..., anew=..., constants=..., **parts of the
    configuration)` starts a proxy in front of the session's broker. After the test it must end in
    order and without faults in its log.
    """
    numbers = count()
    with ExitStack() as stack:

        def start(
            *arguments: str,
            bootstrap_servers: str = "",
            anew: bool = False,
            constants: Constants = NONE,
            **parts: Any,
        ) -> ProxyProcess:
            process = ProxyProcess(
                config(bootstrap_servers or kafka.bootstrap, **parts),
                tmp_path / f"proxy-{next(numbers)}",
                arguments,
                anew=anew,
                constants=constants,
            )
            stack.callback(process.kill)
            process.start()
            stack.callback(process.stop)
            return process

        yield start


@pytest.fixture(params=DATA_PATHS)
def data_path(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Arguments that choose how record data is moved."""
    return DATA_PATHS[request.param]


@pytest.fixture
def listen(
    spark: SparkSession, proxy: Callable[..., ProxyProcess]
) -> Iterator[Callable[..., QuotaListener]]:
    """`listen(running)` lets Spark report its batches to a proxy, for this test."""
    assert proxy  # it outlives the listeners
    with attaching(spark) as attach:
        yield lambda running: attach(QuotaListener(running.admin_url))


@pytest.fixture
def stream(
    kafka: EmbeddedBroker,
    spark: SparkSession,
    listen: Callable[..., QuotaListener],
    tmp_path: Path,
) -> Iterator[Callable[..., Stream]]:
    """`stream(running, name, topic, row_ms=0.0)` makes a query; its runs end with the test."""
    assert listen  # it outlives the queries
    streams: list[Stream] = []

    def make(running: ProxyProcess, name: str, topic: str, row_ms: float = 0.0) -> Stream:
        checkpoint = tmp_path / f"{name}-checkpoint"
        made = Stream(spark, kafka.bootstrap, running, name, topic, checkpoint, row_ms)
        streams.append(made)
        return made

    yield make
    for each in streams:
        each.stop()


@pytest.fixture
def no_data_loss(spark_log_file: Path) -> Iterator[None]:
    """Require of a test that Spark warns of no lost data and of no offsets that went back."""
    begin = spark_log_file.stat().st_size if spark_log_file.exists() else 0
    yield
    with spark_log_file.open() as log:
        log.seek(begin)
        assert [line for line in log if LOSS.search(line)] == []
