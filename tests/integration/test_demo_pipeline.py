import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 280
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_SIZE = (1600, 900)


@pytest.mark.slow
def test_demo_follows_source_batches_and_loses_nothing(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "proxy", "demo", "pipeline", "--brief"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    said = result.stdout + result.stderr
    # The other promises are about time: the run is too short and the machine too busy for these.
    assert result.returncode in (0, 1), said
    kept = [line for line in result.stdout.splitlines() if line.rstrip().endswith(" holds")]
    for promise in ("rows exactly once", "is known to be finished", "tells how long"):
        assert any(promise in line for line in kept), said
    assert "'first' is held at" in result.stdout, said

    out = tmp_path / "build" / "demo-pipeline"
    png = (out / "pipeline.png").read_bytes()
    assert png.startswith(PNG_SIGNATURE)
    assert struct.unpack(">II", png[16:24]) == PNG_SIZE
    assert "max_lag: 2400" in (out / "demo-pipeline.yaml").read_text()
    logs = {path.name for path in out.glob("*.log")}
    assert logs == {"proxy.log", "queries.log", "feed.log", "warm-up.log"}
