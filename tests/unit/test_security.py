"""SECURITY.md: each threat names a test that holds it, and this test is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
THREATS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TEXT.partition("## Threats\n")[2].partition("\n## ")[0].splitlines()
    if line.startswith("| ") and "the test |" not in line
]
ONE_PAGE_LINES = 80


@cache
def functions_of(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_it_is_a_page() -> None:
    assert len(TEXT.splitlines()) <= ONE_PAGE_LINES
    assert len(THREATS) > 10


@pytest.mark.parametrize("threat", THREATS, ids=lambda threat: threat[0])
def test_each_threat_has_tests_that_there_are(threat: list[str]) -> None:
    _, _, tests = threat
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert named
    assert tests.count("`") == 2 * len(named)
    for path, name in named:
        assert name in functions_of(ROOT / path), f"{path} has no {name}"
