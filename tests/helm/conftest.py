"""What the tests of the chart share: helm and promtool."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Helper modules are no test modules: under import mode importlib they are found by path only.
sys.path.append(str(Path(__file__).parent))

from chart import Helm
from helm_binary import ensure_helm


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm; the first time it may have to be built, which takes some minutes."""
    return Helm(ensure_helm())


@pytest.fixture(scope="session")
def promtool() -> Callable[..., str]:
    """`promtool(*arguments)` gives what it printed; it must succeed."""
    path = shutil.which("promtool")
    if path is None:
        pytest.fail("promtool is missing: apt-get install prometheus")

    def run(*arguments: str | Path) -> str:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
