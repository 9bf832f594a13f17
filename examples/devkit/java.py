"""Finds a Java that runs Kafka and Spark."""

import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from examples.devkit import JavaError

MIN_JAVA_VERSION = 17

_FIX = f"Install Java {MIN_JAVA_VERSION} or newer, and let JAVA_HOME or PATH lead to it."
_TIMEOUT_S = 30
_VERSION = re.compile(r'version "(?:1\.)?(?P<major>\d+)')


def find_java() -> Path:
    """Return the `java` of `JAVA_HOME`, or else the first on the PATH; raises `JavaError`."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise JavaError(f"No Java was found {where}.", _FIX)
    major = _major_version(found)
    if major < MIN_JAVA_VERSION:
        raise JavaError(f"{found} is Java {major}, which is too old.", _FIX)
    return Path(found)


@cache
def _major_version(java: str) -> int:
    """Ask a Java for its version, once in a process. Raises `JavaError`."""
    try:
        answer = subprocess.run(
            [java, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{java} does not run: {error}", _FIX) from error
    version = _VERSION.search(answer.stderr)
    if version is None:
        raise JavaError(f"{java} does not tell its version: {answer.stderr.strip()}", _FIX)
    return int(version["major"])
