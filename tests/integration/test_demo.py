import re
from pathlib import Path

import pytest
from support.demos import check_picture, run_demo
from support.operating import quota_proxy

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
    code, _, err = quota_proxy("demo", f"--megabytes={megabytes}")

    assert code == 2
    assert f"{megabytes!r} is not a number of MiB, 1 or more" in err
