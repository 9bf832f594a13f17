"""The demo of budgets: three queries and a backfill share a link for a day, in two minutes.

The backfill reads all the time, as fast as it is let. Each query that begins to read has its share
at once, and what it leaves when it ends the others have.
"""

import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kafka import KafkaProducer
from rich.console import Console

from examples.demo import canvas, trial
from examples.demo.canvas import BOUND_LINE, FREE_COLOUR, MAIN_COLOUR, OTHER_COLOUR
from examples.demo.children import Child
from examples.demo.figures import MIB, SCRAPE_TIMEOUT_S
from examples.demo.frame import Frame, Pace, Scenario, Servers, make_topics, servers
from examples.demo.jobs import DAY_GO_FILE, DAY_TOPIC
from examples.devkit.jars import connector_jars

BUDGET, GUARANTEED = 8 * MIB, 4 * MIB
"""As in the example: of all, and of `orders`."""
HOURS = {"orders": (6, 20), "reports": (9, 18), "notebook": (11, 16)}
"""When each query reads; the client ids, whose rules the example has."""
BACKFILL = "backfill"
DAY_HOURS = 24
HOUR_S, BRIEF_HOUR_S = 4.0, 1.5
PARTITIONS = 3
RECORD_BYTES, RECORDS = 64 * 1024, 6_000
"""So much that no query has read it all before it ends."""
MOST, WINDOW_S = 1.1, 11
LEAST_USED, LEAST_OF_GUARANTEE = 0.95, 0.8
"""The latter as a query wants nothing between two of its batches."""
SETTLE_S = 5
"""Of a query's hours: until Spark has begun to read."""
COLOURS = {"orders": MAIN_COLOUR, "reports": OTHER_COLOUR, "notebook": "#5b8c5a"}

_FETCHED = re.compile(r'^kafka_quota_proxy_bytes_total\{api="Fetch",client_id="(\w+)".*\} (\S+)$')


@dataclass(frozen=True, slots=True)
class Seen:
    """What the proxy said each second, from the beginning of the day."""

    hour_s: float
    rates: Mapping[str, Sequence[float]]
    """Bytes per second, by client."""

    @property
    def totals(self) -> list[float]:
        """The rates of all together."""
        return [sum(each) for each in zip(*self.rates.values(), strict=True)]


def measure(frame: Frame, _megabytes: int | None, brief: bool) -> Seen:
    """Run broker, proxy, Spark and the backfill for a day."""
    screen, hour_s = frame.screen, BRIEF_HOUR_S if brief else HOUR_S

    def prepare(broker: str) -> None:
        screen.step(f"Topic {DAY_TOPIC!r}: {RECORDS * RECORD_BYTES // MIB} MiB")
        make_topics(broker, (DAY_TOPIC,), PARTITIONS)
        producer = KafkaProducer(bootstrap_servers=broker, batch_size=4 * RECORD_BYTES)
        for number in range(RECORDS):
            producer.send(DAY_TOPIC, bytes(RECORD_BYTES), partition=number % PARTITIONS)
        producer.close()

    with servers(frame, "demo-budgets.yaml", prepare) as running:
        screen.step(f"Spark starts for {', '.join(HOURS)}; {BACKFILL} reads")
        spans = {name: [each * hour_s for each in span] for name, span in HOURS.items()}
        own = {"jars": ",".join(map(str, connector_jars())), "work_dir": str(frame.work_dir)}
        pace = {"bytes_per_second": 10 * BUDGET}
        where = {"bootstrap": running.bootstrap}
        with (
            frame.start("queries", "queries", "day", spans=spans, **where, **own) as queries,
            frame.start(
                "backfill", "neighbour", client_id=BACKFILL, topic=DAY_TOPIC, **where, **pace
            ) as backfill,
        ):
            queries.wait_for(lambda: queries.said() or None, "started", trial.START_TIMEOUT_S)
            backfill.wait_for(lambda: backfill.said() or None, "read", trial.START_TIMEOUT_S)
            Path(frame.work_dir, DAY_GO_FILE).touch()
            screen.step(f"The day begins: an hour is {hour_s:g} s")
            return _watch(running, hour_s, queries)


def _watch(running: Servers, hour_s: float, queries: Child) -> Seen:
    pace, found = Pace(), [_fetched(running.admin_url)]
    for _ in range(round(DAY_HOURS * hour_s)):
        pace.wait()
        queries.require_running()
        found.append(_fetched(running.admin_url))
    names = (BACKFILL, *HOURS)
    rates = {
        name: [after.get(name, 0.0) - before.get(name, 0.0) for before, after in pairwise(found)]
        for name in names
    }
    return Seen(hour_s, rates)


def _fetched(admin_url: str) -> dict[str, float]:
    """Return how many bytes each client has fetched so far."""
    with urllib.request.urlopen(f"{admin_url}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return {match[1]: float(match[2]) for line in lines if (match := _FETCHED.match(line))}


def conclude(console: Console, seen: Seen) -> int:
    """Compare the rates with what a budget promises."""
    totals = seen.totals
    most = max(
        sum(totals[start : start + WINDOW_S]) / WINDOW_S / BUDGET
        for start in range(len(totals) - WINDOW_S + 1)
    )
    used = sum(totals) / len(totals) / BUDGET
    start, end = (round(hour * seen.hour_s) for hour in HOURS["orders"])
    orders = seen.rates["orders"][start + SETTLE_S : end]
    had = sum(orders) / len(orders) / GUARANTEED
    return trial.summarise(
        console,
        [
            trial.Claim(
                f"all together have at most {MOST:g} times the budget in {WINDOW_S} s",
                f"{most:.3f}",
                most <= MOST,
            ),
            trial.Claim(
                "nothing is left idle while the backfill waits",
                f"{used:.1%} of the budget is used",
                used >= LEAST_USED,
            ),
            trial.Claim(
                f"orders has {LEAST_OF_GUARANTEE:.0%} of what it is guaranteed, or more",
                f"{had:.0%}",
                had >= LEAST_OF_GUARANTEE,
            ),
        ],
    )


def draw(seen: Seen, path: Path) -> None:
    """Draw the rates one upon the other, by the hour of the day."""
    title = "A link of 8 MiB/s for a day: each has its share, and nothing is left idle"
    hours = [second / seen.hour_s for second in range(len(seen.totals))]
    with canvas.picture(path, title, (1,)) as axes:
        names = (*HOURS, BACKFILL)
        axes.stackplot(
            hours,
            *([rate / MIB for rate in seen.rates[name]] for name in names),
            labels=names,
            colors=[COLOURS.get(name, FREE_COLOUR) for name in names],
            alpha=0.85,
        )
        axes.axhline(BUDGET / MIB, **BOUND_LINE)
        axes.set(ylabel="MiB per second", xlabel="hour of the day", xlim=(0, DAY_HOURS))
        axes.set_ylim(0, 1.25 * BUDGET / MIB)
        axes.legend(loc="upper right", ncols=len(names), frameon=False)


SCENARIO = Scenario(Path("build/demo-budgets"), "budgets.png", measure, draw, conclude)
