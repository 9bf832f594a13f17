"""What the tests of the Spark driver's side share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from proxy.spark import QuotaListener

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from listening.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """A server that takes reports; a test may change its behaviour, stop it and start it again."""
    server = Receiver().start()
    yield server
    server.stop()


@pytest.fixture
def listen(receiver: Receiver) -> Iterator[Callable[..., QuotaListener]]:
    """`listen(url=None, **arguments)` makes a listener that reports to the receiver, and ends it
    after the test.
    """
    with ExitStack() as stack:

        def make(url: str | None = None, **arguments: Any) -> QuotaListener:
            listener = QuotaListener(url or receiver.url, **arguments)
            stack.callback(listener.close, 0)
            return listener

        yield make
