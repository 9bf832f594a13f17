"""Runs the demo of pipelines from the first step to the verdict."""

from collections.abc import Callable
from pathlib import Path

from proxy.demo.frame import framed
from proxy.demo.pipeline.figures import Sample, judge, sample_of
from proxy.demo.pipeline.jobs import FIRST, JOBS, LAST_JOBS, SECOND, SOURCE
from proxy.demo.pipeline.plot import draw
from proxy.demo.screen import Screen
from proxy.demo.trial import Feed, Trial, measure
from proxy.demo.verdict import Timing, judge_rows, lag_of, progress, read_text, summarise

PICTURE = "pipeline.png"
TRIAL = Trial(
    example="demo-pipeline.yaml",
    module="proxy.demo.pipeline.query",
    source=SOURCE,
    jobs=JOBS,
    start_text="PySpark queries start: 'first' and 'second' are a pipeline, "
    "'free-first' and 'free-second' are not",
    slow_text=f"{SECOND.name!r} slows down, and so does the one beside it",
    fast_text="They are fast again",
    warm_up=Feed(rate=100.0, duration_s=12.0),
)

FULL = Timing(fast_s=20.0, slow_s=55.0, again_s=45.0)
BRIEF = Timing(fast_s=5.0, slow_s=20.0, again_s=5.0)


def run(out_dir: Path, timing: Timing) -> int:
    """Run the demo; return 0 when every claim holds. Raises `DevkitError`."""
    with framed(out_dir, PICTURE) as frame:
        outcome = measure(TRIAL, frame, timing, _look(frame.screen))
        draw(outcome, out_dir / PICTURE)
        claims = [*judge(outcome), judge_rows(outcome, len(LAST_JOBS))]
        return summarise(frame.screen.console, claims)


def _look(screen: Screen) -> Callable[[str, float], Sample]:
    """Return what asks the proxy how far the queries are, and says when control begins or ends.

    It raises DemoError.
    """
    was_held = False

    def look(admin_url: str, now_s: float) -> Sample:
        nonlocal was_held
        sample = sample_of(read_text(f"{admin_url}/metrics"), lag_of(progress(admin_url)), now_s)
        if sample.is_held != was_held:
            was_held = sample.is_held
            now = f"is held at {sample.rate:,.0f} records/s" if was_held else "is free again"
            screen.step(f"{FIRST.name!r} {now}")
        return sample

    return look
