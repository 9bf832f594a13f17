from pathlib import Path

import pytest
from support.demos import check_picture, promises_kept, run_demo


@pytest.mark.slow
def test_demo_ends_with_a_report_of_all_that_was_counted(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "usage", "--brief")

    assert result.returncode == 0, result.stdout + result.stderr
    assert len(promises_kept(result)) == 4
    out = tmp_path / "build" / "demo-usage"
    check_picture(out / "usage.png")
    assert (out / "usage.html").read_text().startswith("<!DOCTYPE html>")
