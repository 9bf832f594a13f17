"""No room grows unseen: each has a budget of lines, which is lowered as the room shrinks."""

from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]

SLACK = 200
"""A budget of which so many lines are not used is to be lowered."""


class Budget(NamedTuple):
    """How many lines a room may have now, and how many it is to have."""

    lines: int
    goal: int


BUDGETS = {
    "proxy/__init__.py proxy/__main__.py proxy/cli.py proxy/errors.py proxy/release.py": Budget(
        382, 200
    ),
    "proxy/launcher": Budget(517, 400),
    "proxy/member.py proxy/wiring.py proxy/host_ports.py proxy/hot_restart.py "
    "proxy/debt_records.py proxy/health.py proxy/garbage.py": Budget(1349, 650),
    "proxy/tier": Budget(4137, 2350),
    "proxy/onboarding": Budget(960, 700),
    "proxy/queries": Budget(983, 650),
    "proxy/admin": Budget(6234, 4250),
    "proxy/config": Budget(2635, 2150),
    "proxy/relay": Budget(6860, 4300),
    "proxy/usage": Budget(959, 950),
    "proxy/pipeline": Budget(3120, 2700),
    "proxy/backpressure": Budget(2520, 1950),
    "proxy/quota": Budget(5714, 3100),
    "proxy/progress": Budget(3705, 2950),
    "proxy/state": Budget(2311, 1300),
    "proxy/wire proxy/cluster proxy/log_queue.py proxy/slices.py proxy/tasks.py metrics": Budget(
        5331, 4430
    ),
    "proxy/spark/__init__.py proxy/spark/quota_listener.py": Budget(898, 650),
    "proxy/spark/usage": Budget(1599, 900),
}
"""By the folders and modules of each room."""


def modules_of(paths: str) -> list[Path]:
    places = [ROOT / path for path in paths.split()]
    return [
        path for place in places for path in ([place] if place.is_file() else place.rglob("*.py"))
    ]


@pytest.mark.parametrize("room", BUDGETS)
def test_a_room_keeps_to_its_budget(room: str):
    lines = sum(len(path.read_text().splitlines()) for path in modules_of(room))
    budget = BUDGETS[room]
    assert lines <= budget.lines, "delete what exists twice, or say why the budget is to be higher"
    assert lines > budget.lines - SLACK, "lower the budget"
    assert budget.goal <= budget.lines


def test_each_module_is_in_one_room():
    found = sorted(path for room in BUDGETS for path in modules_of(room))
    assert found == sorted(
        path for top in ("proxy", "metrics") for path in (ROOT / top).rglob("*.py")
    )
