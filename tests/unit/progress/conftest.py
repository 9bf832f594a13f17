"""What the tests of progress share: a world, and a driver in it."""

import sys
from pathlib import Path

import pytest

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from progress_world import Driver, ProgressWorld


@pytest.fixture
def world() -> ProgressWorld:
    return ProgressWorld()


@pytest.fixture
def driver(world: ProgressWorld) -> Driver:
    """A driver whose first batch completed all below 10."""
    driver = world.driver()
    driver.send("started")
    driver.batch(0, 10)
    world.events.clear()
    return driver
