from pathlib import Path

import pytest

from bench import bound, clients, entities, loop_rounds, own_quota, spark_read
from bench.plots import (
    BEGIN,
    END,
    MOST_ROWS,
    PAGE,
    PANELS,
    conditions,
    draw,
    merged,
    replaced,
    tables,
)
from bench.report import machine


def _row(figure: str, number: int = 0, verdict: str = "met") -> dict[str, object]:
    cells = {"what": f"case {number}", "target": "2 %", "measured": f"{number} %", "samples": {}}
    return {"figure": figure, "verdict": verdict, **cells}


def test_the_page_has_a_place_for_the_table() -> None:
    page = PAGE.read_text()
    written = replaced(page, ["| a table |"])
    assert f"{BEGIN}\n| a table |\n{END}" in written
    assert replaced(written, []) == replaced(page, [])


@pytest.mark.parametrize("page", ["", BEGIN, END + BEGIN])
def test_a_page_without_a_place_is_not_written(page: str) -> None:
    with pytest.raises(ValueError, match="once"):
        replaced(page, [])


def test_a_later_run_counts_for_the_figures_that_it_has() -> None:
    first, second = [_row("a", 1), _row("a", 2), _row("b", 3)], [_row("a", 4)]
    assert merged([first, second]) == [_row("a", 4), _row("b", 3)]


def test_each_row_is_a_line_with_its_verdict() -> None:
    rows = [_row("a"), _row("a", 1, "missed"), _row("b", 2, "info")]
    assert list(tables(rows))[2:] == [
        "| `a` | case 0 | 0 % | 2 % | yes |",
        "|  | case 1 | 1 % | 2 % | **no** |",
        "| `b` | case 2 | 2 % | 2 % |  |",
    ]


def test_many_rows_are_summed_up_beside_those_that_miss() -> None:
    rows = [_row("a", number) for number in range(MOST_ROWS)]
    rows += [_row("a", 90, "missed"), _row("a", 91, "info")]
    assert list(tables(rows))[2:] == [
        f"| `a` | all cases | {MOST_ROWS} of {MOST_ROWS + 1} as aimed at | all | **no** |",
        "|  | case 90 | 90 % | 2 % | **no** |",
    ]


def test_conditions_name_cores_and_versions_and_nothing_else_of_the_machine() -> None:
    facts = machine()
    text = conditions(facts)
    assert f"{facts['cores']} cores" in text
    assert f"Python {facts['python']}" in text
    assert str(facts["kernel"]) not in text
    assert str(facts["processor"]) not in text


def test_each_picture_is_of_a_figure_that_there_is() -> None:
    modules = (bound, clients, entities, loop_rounds, own_quota, spark_read)
    assert set(PANELS) == {module.FIGURE for module in modules}


SAMPLES = {
    "own quota": {
        "bound_bytes_per_s": 250_000,
        "connections": 8,
        "bytes_in_each_second": {"Kafka's own quota": [9, 0], "delay": [5, 4], "mute": [4, 5]},
    },
    "bound": {
        "mode": "mute",
        "bound_bytes_per_s": 250_000,
        "interpolated_bytes_per_s": 250_010.0,
    },
    "clients": {"bytes_per_s": {"direct": [1e6], "proxy": [9e5], "haproxy": [9.5e5]}},
    "spark": {"seconds": {"direct": [2.0, 2.1], "proxy": [2.2, 2.0], "haproxy": [2.2, 2.0]}},
    "entities": {"microseconds": {"10": [3.0], "1000": [3.1]}},
    "stalls": {"wall_ms": [1.0, 2.0], "cpu_ms": [1.0, 1.0]},
}


@pytest.mark.parametrize("figures", [list(SAMPLES), ["spark"], []], ids=len)
def test_what_has_samples_is_drawn(figures: list[str], tmp_path: Path) -> None:
    rows = [{**_row(figure), "samples": SAMPLES[figure]} for figure in figures]
    rows += [_row(figure) for figure in PANELS]
    path = tmp_path / "figures.png"
    draw(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")
