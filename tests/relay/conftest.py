"""What the tests of the relay share: both event loops, and certificates."""

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import trustme

sys.path.insert(0, str(Path(__file__).parent))

from relaylab.lab import Certificates


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test of this folder on the standard loop, and on uvloop where that is installed."""
    factories = {"asyncio": asyncio.new_event_loop}
    with suppress(ImportError):
        factories["uvloop"] = import_module("uvloop").new_event_loop
    return factories


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(trustme.CA(), tmp_path_factory.mktemp("certificates"))
