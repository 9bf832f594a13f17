"""The demo of backpressure in its short form: what it runs and writes, not how fast."""

import re
from pathlib import Path

import pytest
from support.demos import check_picture, run_demo

VERDICTS = (0, 1)
"""The short run is too short for every promise to be kept."""


@pytest.mark.slow
def test_every_row_comes_once_and_a_picture_is_drawn(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "backpressure", "--brief")

    assert result.returncode in VERDICTS, result.stdout + result.stderr
    written = re.search(r"([\d,]+) records are written", result.stdout)
    assert written is not None, result.stdout
    for name in ("without", "with"):
        assert f"{name}: {written[1]}" in result.stdout
    out = tmp_path / "build" / "demo-backpressure"
    check_picture(out / "backpressure.png")
    assert "adaptive:" in (out / "demo-backpressure.yaml").read_text()
