"""Runs the demo from the first step to the summary."""

import re
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from proxy.demo.children import Child
from proxy.demo.data import PARTITIONS, RECORD_BYTES, TOPIC, fill
from proxy.demo.figures import (
    LIMITED,
    UNLIMITED,
    Sample,
    average_while_held,
    scrape,
    seconds,
)
from proxy.demo.frame import Frame, framed, servers
from proxy.demo.pace import INTERVAL_S, Pace
from proxy.demo.parts import said, start_neighbour, start_query
from proxy.demo.plot import draw
from proxy.demo.screen import MIB, Screen, View

EXAMPLE, PICTURE = "demo.yaml", "rates.png"
STALL_TIMEOUT_S = 90.0
"""How long the query may fetch nothing: Spark's start on a busy machine, and then some."""
EXIT_DONE = 0

# The first line of a stack trace in Spark's log.
_EXCEPTION = re.compile(r"^(?:Caused by: )?((?:\w+\.)+\w*(?:Exception|Error): .*?)\.?$")


@dataclass(frozen=True, slots=True)
class Parties:
    """The processes that are watched."""

    proxy: Child
    query: Child
    neighbour: Child


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the run gave."""

    rows_in: int
    rows_out: int
    distinct_rows_out: int
    mean_wait_ms: float
    """Of the client without quota, for records."""
    longest_wait_ms: float
    samples: tuple[Sample, ...]

    @property
    def unlimited_rate_bytes(self) -> float:
        """Mean rate per second of the client without quota, since its first bytes."""
        first = next(sample for sample in self.samples if sample.unlimited_bytes)
        last = self.samples[-1]
        duration_s = max(last.at_s - first.at_s, INTERVAL_S)
        return (last.unlimited_bytes - first.unlimited_bytes) / duration_s


def run(megabytes: int, out_dir: Path) -> int:
    """Run the demo as `proxy.demo.run_demo` says."""
    with framed(out_dir, PICTURE) as frame:
        outcome = _measure(frame, megabytes * MIB // RECORD_BYTES)
        draw(outcome.samples, out_dir / PICTURE)
        _summarise(frame.screen.console, outcome)
    return EXIT_DONE


def _measure(frame: Frame, rows: int) -> Outcome:
    """Start all parts, watch them until the query is done, and stop them."""
    screen = frame.screen

    def prepare(broker: str) -> None:
        size = rows * RECORD_BYTES // MIB
        screen.step(f"Topic {TOPIC!r}: {rows:,} records, {size} MiB, {PARTITIONS} partitions")
        with screen.progress("writing") as report:
            fill(broker, rows, lambda done: report(done, rows))

    with servers(frame, EXAMPLE, prepare) as running:
        addresses = running.addresses
        screen.step(f"PySpark query {LIMITED!r} and consumer {UNLIMITED!r} start")
        with (
            start_query(addresses.bootstrap, frame.work_dir, frame.out_dir) as query,
            start_neighbour(addresses.bootstrap, frame.out_dir) as neighbour,
        ):
            parties = Parties(running.proxy, query, neighbour)
            samples = _watch(screen, f"{addresses.admin_url}/metrics", rows, parties)
            return _outcome(rows, parties, samples)


def _watch(screen: Screen, url: str, rows: int, parties: Parties) -> list[Sample]:
    """Show and collect samples until the query has ended; raises `DemoError` when a part fails."""
    samples: list[Sample] = []
    pace, moved_s = Pace(), time.monotonic()
    with screen.live() as show:
        while parties.query.exit_code is None:
            parties.proxy.require_running()
            parties.neighbour.require_running()
            try:
                sample = scrape(url, time.monotonic())
            except OSError as error:
                raise parties.proxy.failure(
                    f"The proxy does not tell its metrics: {error}."
                ) from error
            if samples and sample.limited_bytes > samples[-1].limited_bytes:
                moved_s = sample.at_s
            if sample.at_s - moved_s > STALL_TIMEOUT_S:
                raise parties.query.failure(
                    f"The query has fetched nothing for {STALL_TIMEOUT_S:g} s."
                )
            samples.append(sample)
            show(_view(samples, rows, said(parties.query), said(parties.neighbour)))
            pace.wait()
    if parties.query.exit_code:
        reason = next(filter(None, map(_EXCEPTION.match, parties.query.lines())), None)
        what = f": {reason[1]}" if reason else ""
        raise parties.query.failure(f"The Spark query failed{what}.")
    return samples


def _view(
    samples: list[Sample], rows: int, query: dict[str, float], neighbour: dict[str, float]
) -> View:
    latest = samples[-1]
    second = seconds(samples[-2:])
    return View(
        elapsed_s=latest.at_s - samples[0].at_s,
        rate_bytes=latest.rate_bytes,
        bound_bytes=latest.bound_bytes,
        unlimited_rate_bytes=second[-1].unlimited_rate if second else 0.0,
        throttle_s=second[-1].throttle_s if second else 0.0,
        queued=latest.queued,
        holds=latest.holds,
        held_s=latest.held_s,
        batches=int(query.get("batches", 0)),
        rows=int(query.get("rows", 0)),
        total_rows=rows,
        longest_wait_ms=neighbour.get("longest_wait_ms", 0.0),
        history=tuple(sample.rate_bytes for sample in samples),
    )


def _outcome(rows: int, parties: Parties, samples: list[Sample]) -> Outcome:
    """Gather what was found; raises `DemoError` when rows were lost or came twice."""
    figures, waits = said(parties.query), said(parties.neighbour)
    outcome = Outcome(
        rows_in=rows,
        rows_out=int(figures["rows_out"]),
        distinct_rows_out=int(figures["distinct_rows_out"]),
        mean_wait_ms=waits.get("mean_wait_ms", 0.0),
        longest_wait_ms=waits.get("longest_wait_ms", 0.0),
        samples=tuple(samples),
    )
    if not outcome.rows_in == outcome.rows_out == outcome.distinct_rows_out:
        raise parties.query.failure(
            f"{outcome.rows_in:,} rows went in, {outcome.rows_out:,} came out, "
            f"{outcome.distinct_rows_out:,} of them distinct."
        )
    return outcome


def _summarise(console: Console, outcome: Outcome) -> None:
    latest = outcome.samples[-1]
    average = average_while_held(outcome.samples)
    if average is None:
        rate = "the query was not held: too little to read for its bound"
    else:
        share = average.rate_bytes / latest.bound_bytes
        rate = (
            f"{average.rate_bytes / MIB:.2f} MiB/s against a bound of "
            f"{latest.bound_bytes / MIB:.2f} MiB/s ({share:.1%}), "
            f"over the {average.duration_s:.0f} s in which it was held"
        )
    lines = {
        "rows": f"{outcome.rows_in:,} in = {outcome.rows_out:,} out, none twice",
        "average rate": rate,
        "holds": f"{latest.holds} responses, {latest.held_s:.1f} s in total over its connections",
        f"{UNLIMITED!r} beside it": (
            f"{outcome.unlimited_rate_bytes / MIB:.2f} MiB/s, "
            f"waited {outcome.mean_wait_ms:.0f} ms for records on average, "
            f"{outcome.longest_wait_ms:.0f} ms at most"
        ),
    }
    width = max(map(len, lines))
    console.print(Text(f"\nWhat the proxy did to {LIMITED!r}", style="bold"))
    for name, text in lines.items():
        console.print(f"  {name:{width}}  {text}", highlight=False, soft_wrap=True)
    console.print()
