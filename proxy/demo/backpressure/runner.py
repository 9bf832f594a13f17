"""Runs the demo of backpressure from the first step to the verdict."""

from pathlib import Path

from proxy.demo.backpressure.figures import judge
from proxy.demo.backpressure.jobs import FREE, JOBS, PRESSED, ROW_MS, SLOW_ROW_MS, SOURCE
from proxy.demo.backpressure.plot import draw
from proxy.demo.frame import framed
from proxy.demo.jobs import TRIGGER_S
from proxy.demo.trial import Trial, measure
from proxy.demo.verdict import Sample, Timing, judge_rows, lag_of, progress, summarise

PICTURE = "backpressure.png"
TRIAL = Trial(
    example="demo-backpressure.yaml",
    module="proxy.demo.backpressure.query",
    source=SOURCE,
    jobs=JOBS,
    start_text=f"PySpark queries {FREE.name!r} and {PRESSED.name!r} start, "
    f"one trigger in {TRIGGER_S:g} s",
    slow_text=f"Processing slows down: {SLOW_ROW_MS / ROW_MS:g} times the time for each record",
    fast_text="Processing is fast again",
)

FULL = Timing(fast_s=36.0, slow_s=40.0, again_s=28.0)
BRIEF = Timing(fast_s=8.0, slow_s=10.0, again_s=6.0)


def run(out_dir: Path, timing: Timing) -> int:
    """Run the demo; return 0 when every claim holds. Raises `DevkitError`."""
    with framed(out_dir, PICTURE) as frame:
        outcome = measure(TRIAL, frame, timing, _look)
        draw(outcome, out_dir / PICTURE)
        claims = [*judge(outcome), judge_rows(outcome, len(JOBS))]
        return summarise(frame.screen.console, claims)


def _look(admin_url: str, now_s: float) -> Sample:
    """Ask the proxy how far the queries are; none holds back another. Raises DemoError."""
    return Sample(now_s, lag_of(progress(admin_url)), is_held=False)
