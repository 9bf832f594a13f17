"""What the tests of progress share: a world, and a driver in it."""

import sys
from pathlib import Path

import pytest

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from progress_world import Driver, World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def driver(world: World) -> Driver:
    """A driver whose first batch completed all below 10."""
    driver = world.driver()
    driver.send("started")
    driver.batch(0, 10)
    world.events.clear()
    return driver
