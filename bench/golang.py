"""Builds the Go programs of the bench: our own group, and the tests that a client library ships."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from bench.processes import BenchError

SOURCES = Path(__file__).with_name("go")
INSTALLED_IN = "/usr/local/go/bin"
# The first build downloads the libraries and compiles them.
BUILD_TIMEOUT_S = 600.0


def find_go() -> str | None:
    """Return the `go` on the PATH or where its installer puts it; None when there is none."""
    places = os.pathsep.join([os.environ.get("PATH", os.defpath), INSTALLED_IN])
    return shutil.which("go", path=places)


def build(go: str, target: Path, program: str = ".") -> Path:
    """Build one of our own programs into the file `target`; raises BenchError when that fails."""
    return _run([go, "build", "-o", str(target), program], target)


def build_tests(go: str, package: str, target: Path) -> Path:
    """Build a library's tests into the file `target`, of the version that our go.mod names."""
    return _run([go, "test", "-c", "-o", str(target), package], target)


def version_of(library: str) -> str:
    """Return the version of a library that our go.mod names."""
    line = re.search(rf"^\t{re.escape(library)} (\S+)$", (SOURCES / "go.mod").read_text(), re.M)
    return line[1] if line else "of unknown version"


def _run(command: list[str], target: Path) -> Path:
    try:
        done = subprocess.run(
            command,
            cwd=SOURCES,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchError(f"go: {error}") from error
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed:\n{done.stderr}")
    return target
