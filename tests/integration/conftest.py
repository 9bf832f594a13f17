"""What the integration tests share: proxies that are started, and in the end judged, for a test."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from proxy.devkit.broker import EmbeddedBroker

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from support.proxy_process import ProxyProcess, config

DATA_PATHS = {"splice": (), "copy": ("--no-splice",)}


@pytest.fixture
def proxy(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[Callable[..., ProxyProcess]]:
    """`proxy(*arguments, bootstrap_servers=..., **parts of the configuration)` starts a proxy in
    front of the session's broker. After the test it must end in order and without faults in its
    log.
    """
    numbers = count()
    with ExitStack() as stack:

        def start(*arguments: str, bootstrap_servers: str = "", **parts: Any) -> ProxyProcess:
            process = ProxyProcess(
                config(bootstrap_servers or kafka.bootstrap, **parts),
                tmp_path / f"proxy-{next(numbers)}",
                arguments,
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
