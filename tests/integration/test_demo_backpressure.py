"""The demo of backpressure in its short form: what it runs and writes, not how fast."""

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 240
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_SIZE = (1600, 900)
VERDICTS = (0, 1)
"""The short run is too short for every promise to be kept."""


@pytest.mark.slow
def test_every_row_comes_once_and_a_picture_is_drawn(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "proxy", "demo", "backpressure", "--brief"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert result.returncode in VERDICTS, result.stdout + result.stderr
    written = re.search(r"([\d,]+) records are written", result.stdout)
    assert written is not None, result.stdout
    for name in ("without", "with"):
        assert f"{name}: {written[1]}" in result.stdout
    out = tmp_path / "build" / "demo-backpressure"
    png = (out / "backpressure.png").read_bytes()
    assert png.startswith(PNG_SIGNATURE)
    assert struct.unpack(">II", png[16:24]) == PNG_SIZE
    assert "adaptive:" in (out / "demo-backpressure.yaml").read_text()
