"""Run a demo as its user does, and look at the picture that it draws."""

import os
import struct
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 840
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_SIZE = (1600, 900)


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return how `quota-proxy demo` ended in a folder, with lines that are not wrapped."""
    return subprocess.run(
        [sys.executable, "-m", "proxy", "demo", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def check_picture(path: Path) -> None:
    """Fail unless this is a PNG of the size that all demos draw."""
    png = path.read_bytes()
    assert png.startswith(PNG_SIGNATURE)
    assert struct.unpack(">II", png[16:24]) == PNG_SIZE


def promises_kept(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines of those promises that held."""
    return [line for line in done.stdout.splitlines() if line.rstrip().endswith(" holds")]
