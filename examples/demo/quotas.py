"""The demo of quotas: a query is held to its own, and a client beside it has none.

The query is in `queries`, the client without quota `neighbour`.
"""

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kafka import KafkaProducer
from kafka.errors import KafkaError
from rich.console import Console
from rich.text import Text

from examples.demo import DemoError, canvas
from examples.demo.canvas import BOUND_COLOUR, BOUND_LINE, MAIN_COLOUR, OTHER_COLOUR
from examples.demo.children import Child
from examples.demo.figures import (
    LIMITED,
    MIB,
    UNLIMITED,
    Sample,
    average_while_held,
    rate_text,
    scrape,
    seconds,
)
from examples.demo.frame import (
    LOOK_INTERVAL_S,
    Frame,
    Pace,
    Scenario,
    Servers,
    make_topics,
    servers,
)
from examples.demo.panel import panel
from examples.demo.screen import Screen
from examples.devkit.jars import connector_jars
from metrics.clock import MS_PER_SECOND

MEGABYTES = 100
"""How much the query reads: at the example's bound of 2 MiB/s it takes about 50 s."""
TOPIC = "orders"
PARTITIONS = 3
RECORD_BYTES = 4096
UNLIMITED_BYTES_PER_S = 4 * MIB
"""A modest pace, some times the query's bound."""
STALL_TIMEOUT_S = 90.0
"""How long the query may fetch nothing: Spark's start on a busy machine, and then some."""
EXIT_DONE = 0

BATCH_BYTES = 512 * 1024
LINGER_MS = 20
FLUSH_TIMEOUT_S = 60.0
REPORT_RECORDS = 500
SEED = 20

Figures = Mapping[str, float]

PANEL_HEIGHTS = (3, 1)
HEADROOM = 1.15
BEFORE_S = 5.0
"""How much is shown of the time before the query's first fetch."""
BAR_S = 0.8

# The first line of a stack trace in Spark's log.
_EXCEPTION = re.compile(r"^(?:Caused by: )?((?:\w+\.)+\w*(?:Exception|Error): .*?)\.?$")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the run gave."""

    rows: int
    """In, and out once each."""
    waits: Figures
    """What the client without quota has said last."""
    samples: Sequence[Sample]

    @property
    def unlimited_rate_bytes(self) -> float:
        """Mean rate per second of the client without quota, since its first bytes."""
        first = next(sample for sample in self.samples if sample.unlimited_bytes)
        last = self.samples[-1]
        duration_s = max(last.at_s - first.at_s, LOOK_INTERVAL_S)
        return (last.unlimited_bytes - first.unlimited_bytes) / duration_s


def measure(frame: Frame, megabytes: int | None, _brief: bool) -> Outcome:
    """Start all parts, watch them until the query is done, and stop them."""
    rows = (megabytes or MEGABYTES) * MIB // RECORD_BYTES
    screen = frame.screen

    def prepare(broker: str) -> None:
        size = rows * RECORD_BYTES // MIB
        screen.step(f"Topic {TOPIC!r}: {rows:,} records, {size} MiB, {PARTITIONS} partitions")
        with screen.progress("writing") as report:
            fill(broker, rows, lambda done: report(done, rows))

    with servers(frame, "demo.yaml", prepare) as running:
        screen.step(f"PySpark query {LIMITED!r} and consumer {UNLIMITED!r} start")
        where = {"bootstrap": running.bootstrap, "topic": TOPIC}
        own = {"jars": ",".join(map(str, connector_jars())), "work_dir": str(frame.work_dir)}
        pace = {"bytes_per_second": UNLIMITED_BYTES_PER_S}
        with (
            frame.start("query", "queries", "once", client_id=LIMITED, **where, **own) as query,
            frame.start("neighbour", "neighbour", client_id=UNLIMITED, **where, **pace) as other,
        ):
            samples = _watch(screen, running, rows, query, other)
            figures = query.said()
            if not rows == figures["rows_out"] == figures["distinct_rows_out"]:
                raise query.failure(
                    f"{rows:,} rows went in, {figures['rows_out']:,} came out, "
                    f"{figures['distinct_rows_out']:,} of them distinct."
                )
            return Outcome(rows, other.said(), samples)


def fill(bootstrap: str, records: int, report: Callable[[int], None]) -> None:
    """Create the topic and write `records` values of `RECORD_BYTES` to its partitions in turn.

    `report` is told how many were handed over so far. Returns when the broker has confirmed all;
    raises `DemoError` when it has not.
    """
    # Random, or the broker's and the clients' work would be less than that of real data.
    value = random.Random(SEED).randbytes(RECORD_BYTES)
    try:
        make_topics(bootstrap, (TOPIC,), PARTITIONS)
        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            client_id="demo-data",
            batch_size=BATCH_BYTES,
            linger_ms=LINGER_MS,
            acks="all",
        )
        try:
            sent = []
            for number in range(records):
                sent.append(producer.send(TOPIC, value, partition=number % PARTITIONS))
                if number % REPORT_RECORDS == 0:
                    report(number)
            producer.flush(FLUSH_TIMEOUT_S)
        finally:
            producer.close(FLUSH_TIMEOUT_S)
    except KafkaError as error:
        raise _failure(str(error)) from error
    confirmed = sum(future.succeeded() for future in sent)
    if confirmed < records:
        raise _failure(f"the broker confirmed {confirmed} of {records}")
    report(records)


def _failure(reason: str) -> DemoError:
    return DemoError(
        f"The demo's records could not be written: {reason}.",
        "Look for space on the disk, and run it again.",
    )


def _watch(
    screen: Screen, running: Servers, rows: int, query: Child, neighbour: Child
) -> list[Sample]:
    """Show and collect samples until the query has ended; raises `DemoError` when a part fails."""
    samples: list[Sample] = []
    pace, moved_s = Pace(), time.monotonic()
    with screen.live() as show:
        while query.exit_code is None:
            running.proxy.require_running()
            neighbour.require_running()
            try:
                sample = scrape(f"{running.admin_url}/metrics", time.monotonic())
            except OSError as error:
                raise running.proxy.failure(
                    f"The proxy does not tell its metrics: {error}."
                ) from error
            if samples and sample.limited_bytes > samples[-1].limited_bytes:
                moved_s = sample.at_s
            if sample.at_s - moved_s > STALL_TIMEOUT_S:
                raise query.failure(f"The query has fetched nothing for {STALL_TIMEOUT_S:g} s.")
            samples.append(sample)
            state = samples, rows, query.said(), neighbour.said()
            show(_line(*state), panel(*state))
            pace.wait()
    if query.exit_code:
        reason = next(filter(None, map(_EXCEPTION.match, query.lines())), None)
        what = f": {reason[1]}" if reason else ""
        raise query.failure(f"The Spark query failed{what}.")
    return samples


def _line(samples: Sequence[Sample], rows: int, query: Figures, neighbour: Figures) -> str:
    """Say how it is now."""
    latest = samples[-1]
    last = seconds(samples[-2:])
    bound = (
        f"{rate_text(latest.bound_bytes)} bound" if latest.bound_bytes else "bound not in use yet"
    )
    return (
        f"  {latest.at_s - samples[0].at_s:5.0f} s  "
        f"{LIMITED} {rate_text(latest.rate_bytes)} ({bound}), "
        f"throttle {last[0].throttle_s * MS_PER_SECOND if last else 0:.0f} ms, "
        f"delay queue {latest.queued}, rows {query.get('rows', 0):,} of {rows:,} | "
        f"{UNLIMITED} {rate_text(last[0].unlimited_rate if last else 0)}, waits at most "
        f"{neighbour.get('longest_wait_ms', 0):.0f} ms"
    )


def conclude(console: Console, outcome: Outcome) -> int:
    """Say what was seen; no more than that is promised."""
    latest = outcome.samples[-1]
    average = average_while_held(outcome.samples)
    if average is None:
        rate = "the query was not held: too little to read for its bound"
    else:
        rate_bytes, duration_s = average
        rate = (
            f"{rate_text(rate_bytes)} against a bound of "
            f"{rate_text(latest.bound_bytes)} ({rate_bytes / latest.bound_bytes:.1%}), "
            f"over the {duration_s:.0f} s in which it was held"
        )
    lines = {
        "rows": f"{outcome.rows:,} in = {outcome.rows:,} out, none twice",
        "average rate": rate,
        "holds": f"{latest.holds} responses, {latest.held_s:.1f} s in total over its connections",
        f"{UNLIMITED!r} beside it": (
            f"{rate_text(outcome.unlimited_rate_bytes)}, "
            f"waited {outcome.waits.get('mean_wait_ms', 0):.0f} ms for records on average, "
            f"{outcome.waits.get('longest_wait_ms', 0):.0f} ms at most"
        ),
    }
    width = max(map(len, lines))
    console.print(Text(f"\nWhat the proxy did to {LIMITED!r}", style="bold"))
    for name, text in lines.items():
        console.print(f"  {name:{width}}  {text}", highlight=False, soft_wrap=True)
    console.print()
    return EXIT_DONE


def draw(outcome: Outcome, path: Path) -> None:
    """Draw rates and bound over the time in which the query read, and how long responses waited."""
    shown = _while_reading(outcome.samples)
    each = seconds(shown)
    at_s = [second.at_s for second in each]
    bound = max(sample.bound_bytes for sample in shown) / MIB
    title = f"A Spark query is held at its quota of {bound:g} MiB/s, the client beside it is not"
    with canvas.picture(path, title, PANEL_HEIGHTS) as (rates, holds):
        unlimited = [second.unlimited_rate / MIB for second in each]
        limited = [second.limited_rate / MIB for second in each]
        rates.plot(at_s, unlimited, color=OTHER_COLOUR, linewidth=1.6)
        mean = sum(unlimited) / len(unlimited)
        canvas.label(rates, mean, f"{UNLIMITED}\nno quota", OTHER_COLOUR, "data")
        rates.bar(at_s, limited, 1.0, color=MAIN_COLOUR, alpha=0.2, linewidth=0)
        measured = [sample.rate_bytes / MIB for sample in shown]
        shown_s = [sample.at_s for sample in shown]
        line = {"color": MAIN_COLOUR, "linewidth": 2.4, "solid_capstyle": "round"}
        rates.plot(shown_s, measured, **line)
        text = f"{LIMITED}\nline: the proxy's measure\nbars: each second"
        canvas.label(rates, bound / 2, text, MAIN_COLOUR, "data")
        rates.axhline(bound, **BOUND_LINE)
        canvas.label(rates, bound, f"bound, {bound:g} MiB/s", BOUND_COLOUR, "data")
        rates.set(ylim=(0, HEADROOM * max(bound, *unlimited, *limited)), ylabel="MiB/s")
        holds.bar(at_s, [second.throttle_s for second in each], BAR_S, color=MAIN_COLOUR)
        holds.set(ylabel="seconds", xlabel="seconds since the query's first fetch")
        holds.set_xlim(shown[0].at_s, shown[-1].at_s)
        canvas.label(
            holds, max(holds.get_ylim()) / 2, "mean hold of\na response", MAIN_COLOUR, "data"
        )


def _while_reading(samples: Sequence[Sample]) -> list[Sample]:
    """Leave out most of Spark's start, and its end; count time from the query's first fetch."""
    total = samples[-1].limited_bytes
    start_s = max((one.at_s for one in samples if not one.limited_bytes), default=samples[0].at_s)
    last_s = next(sample.at_s for sample in samples if sample.limited_bytes == total)
    return [
        replace(sample, at_s=sample.at_s - start_s)
        for sample in samples
        if start_s - BEFORE_S <= sample.at_s <= last_s
    ]


SCENARIO = Scenario(Path("build/demo"), "rates.png", measure, draw, conclude)
