import struct
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 280
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_SIZE = (1600, 900)
SCRIPT = """
import sys
from pathlib import Path

from proxy.demo.pipeline.runner import BRIEF, run

sys.exit(run(Path(sys.argv[1]), BRIEF))
"""


@pytest.mark.slow
def test_demo_follows_source_batches_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)],
        env={"PATH": "/usr/bin:/bin", "COLUMNS": "300", "HOME": str(Path.home())},
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

    png = (out / "pipeline.png").read_bytes()
    assert png.startswith(PNG_SIGNATURE)
    assert struct.unpack(">II", png[16:24]) == PNG_SIZE
    assert "max_lag: 2400" in (out / "demo-pipeline.yaml").read_text()
    logs = {path.name for path in out.glob("*.log")}
    assert logs == {"proxy.log", "queries.log", "feed.log", "warm-up.log"}
