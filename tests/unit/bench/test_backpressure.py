import pytest

from bench.backpressure_jobs import JOBS, QUICK_JOBS, Job, Phase
from bench.backpressure_judge import Figures, figures_of, lag_of, ratios
from bench.backpressure_run import Batch, Watch


def _watch() -> Watch:
    """100 records a second for 4 s; each batch reads what was there when it began."""
    ends = [(float(second), min(400, 100 * second)) for second in range(8)]
    batches = [
        Batch(1.0, 0.5, 100, 100),
        Batch(2.0, 0.5, 100, 200),
        Batch(3.0, 2.0, 100, 300),
        Batch(5.0, 0.5, 100, 400),
    ]
    return Watch(0.0, 4.0, 7.0, ends, {"q": batches})


def test_lag_is_what_the_ends_are_ahead_of_what_is_completed() -> None:
    assert [lag for _, lag in lag_of(_watch(), "q")] == [0, 100, 100, 100, 200, 100, 0, 0]


def test_figures_of_a_query() -> None:
    assert figures_of(_watch(), "q", until_s=5.0) == Figures(
        mean_lag=100.0,
        max_lag=200,
        completion_s=1.5,
        complete=True,
        first=0.5,
        longest=2.0,
        share=0.5,
        rows=100,
        batches=4,
    )


def test_a_query_that_was_given_up_is_not_complete() -> None:
    watch = _watch()
    watch.batches["q"].pop()
    found = figures_of(watch, "q", until_s=5.0)
    assert not found.complete
    assert found.completion_s == 3.0


@pytest.mark.parametrize(
    ("mean_lag", "completion_s", "wanted"),
    [
        pytest.param(1000, 10.0, (1.0, 1.0), id="the same"),
        pytest.param(1250, 11.0, (1.0, 1.0), id="differs by the floors"),
        pytest.param(1300, 15.0, (1.3, 1.5), id="worse"),
        pytest.param(500, 5.0, (0.5, 0.5), id="better"),
    ],
)
def test_ratios(mean_lag: float, completion_s: float, wanted: tuple[float, float]) -> None:
    none, adaptive = (
        Figures(lag, 1000, seconds, True, 1.0, 1.0, 1.0, 100, 10)
        for lag, seconds in ((1000, 10.0), (mean_lag, completion_s))
    )
    found = ratios(adaptive, none)
    assert (found.mean_lag, found.completion) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("elapsed_s", "due"), [(-1, 0), (0, 0), (1, 5), (2, 10), (2.5, 60), (3, 110), (9, 110)]
)
def test_phases_follow_one_another(elapsed_s: float, due: int) -> None:
    job = Job("j", "", phases=(Phase(2, 5), Phase(1, 100)))
    assert job.fed_after(elapsed_s) == due


def test_quick_jobs_are_jobs() -> None:
    assert set(QUICK_JOBS) <= set(JOBS)
