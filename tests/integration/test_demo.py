import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.demos import TIMEOUT_S, check_picture, run_demo

MEGABYTES = 12
RECORDS = 3072


@pytest.mark.slow
def test_demo_holds_a_spark_query_and_shows_it(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "--megabytes", str(MEGABYTES))

    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{RECORDS:,} in = {RECORDS:,} out, none twice" in result.stdout
    held = re.search(r"average rate +(\S+) MiB/s against a bound of 2\.00 MiB/s", result.stdout)
    assert held is not None, result.stdout
    # Scrapes are a second apart, which is much in a run this short.
    assert 0 < float(held[1]) < 3
    assert re.search(r"holds +[1-9]\d* responses, ", result.stdout)
    assert "'unlimited' beside it" in result.stdout

    out = tmp_path / "build" / "demo"
    check_picture(out / "rates.png")
    assert "consumer_byte_rate: 2MiB" in (out / "demo.yaml").read_text()
    assert {path.name for path in out.glob("*.log")} == {"proxy.log", "query.log", "neighbour.log"}


@pytest.mark.parametrize("megabytes", ["0", "-1", "x", "1.5"])
def test_demo_refuses_a_bad_size(megabytes: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "proxy", "demo", f"--megabytes={megabytes}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert result.returncode == 2
    assert f"{megabytes!r} is not a number of MiB, 1 or more" in result.stderr
