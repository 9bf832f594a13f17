from pathlib import Path

import pytest
from support.demos import check_picture, promises_kept, run_demo

PROMISES = 3


@pytest.mark.slow
def test_demo_kills_a_member_and_its_clients_read_on(tmp_path: Path) -> None:
    result = run_demo(tmp_path, "tier", "--brief")

    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert len(promises_kept(result)) == PROMISES, said

    out = tmp_path / "build" / "demo-tier"
    check_picture(out / "tier.png")
