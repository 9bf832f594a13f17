"""What the admin tests share: a world behind the server, ways to ask it, and a browser."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from admin_world import Ask, World, serve


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def ask(world: World) -> AsyncIterator[Ask]:
    """Asks a server without token."""
    async for each in serve(world.server()):
        yield each


@pytest.fixture
async def ask_guarded(world: World) -> AsyncIterator[Ask]:
    """Asks a server with the token `secret`."""
    async for each in serve(world.server(token="secret")):
        yield each
