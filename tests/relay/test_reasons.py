"""Every reason that is counted is explained, and the other way round."""

import re
from pathlib import Path

import pytest

from proxy.relay import services

LIMITS = Path(__file__).parents[2] / "docs" / "limits.md"


@pytest.mark.parametrize(
    ("metric", "reasons"),
    [
        pytest.param("connections_rejected_total", services.REJECTIONS, id="rejections"),
        pytest.param("upstream_errors_total", services.UPSTREAM_ERRORS, id="upstream errors"),
    ],
)
def test_reasons_are_explained(metric: str, reasons: tuple[str, ...]) -> None:
    _, _, rest = LIMITS.read_text().partition(f"## Reasons of `{metric}`")
    section, _, _ = rest.partition("\n## ")
    named = set(re.findall(r"`([a-z_]+)`", section)) - {"idle_timeout"}
    assert named == set(reasons)
