"""What the admin tests share: a world behind the server, ways to ask it, and a browser."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from admin_world import RULES, AdminWorld, Ask, serve
from chromium import WIDE, Page, chromium, fresh_tab
from spark_world import SparkWorld


@pytest.fixture
def world() -> AdminWorld:
    return AdminWorld()


@pytest.fixture
async def ask(world: AdminWorld) -> AsyncIterator[Ask]:
    """Asks a server without token."""
    async with serve(world.server()) as ask:
        yield ask


@pytest.fixture
def unruled() -> AdminWorld:
    """A world in which only one client id has a rule."""
    return AdminWorld(RULES[:1])


@pytest.fixture
async def ask_unruled(unruled: AdminWorld) -> AsyncIterator[Ask]:
    """Asks a server of that world, without token."""
    async with serve(unruled.server()) as ask:
        yield ask


@pytest.fixture
async def ask_guarded(world: AdminWorld) -> AsyncIterator[Ask]:
    """Asks a server with the token `secret`."""
    async with serve(world.server(token="secret")) as ask:
        yield ask


@pytest.fixture(scope="session")
def browser_url() -> Iterator[str]:
    """The one browser of the session; each test has a tab, and a profile, of its own in it."""
    with chromium() as url:
        yield url


@pytest.fixture
async def page(browser_url: str) -> AsyncIterator[Page]:
    async with fresh_tab(browser_url) as tab:
        await tab.look(**WIDE)
        yield tab


@pytest.fixture
def spark() -> SparkWorld:
    return SparkWorld()


@pytest.fixture
async def ask_spark(spark: SparkWorld) -> AsyncIterator[Ask]:
    """Asks a server that follows queries, without token."""
    async with serve(spark.server()) as ask:
        yield ask
