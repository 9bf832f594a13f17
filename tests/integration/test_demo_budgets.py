from pathlib import Path

import pytest
from support.demos import check_picture, promises_kept, run_demo


@pytest.mark.slow
def test_demo_shares_a_link_for_a_day(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "budgets", "--brief")

    said = result.stdout + result.stderr
    kept = promises_kept(result)
    # How much Spark reads of what it is let depends on the machine: but never more than that.
    assert any("times the budget" in line for line in kept), said
    check_picture(tmp_path / "build" / "demo-budgets" / "budgets.png")
