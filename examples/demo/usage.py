"""The demo of usage: four teams move bytes for a minute, and a report says who moved how many.

Two teams have a Spark query each, one a backfill, and one a notebook that nobody remembers.
"""

import csv
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kafka import KafkaProducer
from rich.console import Console

from examples.demo import CHECKOUT, DemoError, canvas, trial
from examples.demo.canvas import FREE_COLOUR, MAIN_COLOUR
from examples.demo.figures import MIB, SCRAPE_TIMEOUT_S
from examples.demo.frame import Frame, Scenario, Servers, make_topics, servers
from examples.demo.jobs import DAY_GO_FILE
from examples.devkit.jars import connector_jars

CONFIG, TEAMS = "demo-usage.yaml", "teams.yaml"
QUERIES = {"orders-report": "orders", "clicks-report": "clicks"}
BACKFILL, NOTEBOOK = "backfill", "notebook-7"
TEAM_OF = {
    "orders-report": "analytics",
    "clicks-report": "marketing",
    BACKFILL: "platform",
    NOTEBOOK: "data-science",
}
PACES = {BACKFILL: 8 * MIB, NOTEBOOK: MIB // 2}
"""Bytes per second that they ask for."""
RECORD_BYTES, RECORDS, PARTITIONS = 64 * 1024, 2_000, 3
"""Of each topic."""
RUN_S, BRIEF_RUN_S = 60, 10
SETTLE_S = 4
"""After the last byte: four intervals."""
REPORT_TIMEOUT_S = 180

_MOVED = re.compile(r'^kafka_quota_proxy_bytes_total\{.*client_id="([^"]*)".*\} (\S+)$')


@dataclass(frozen=True, slots=True)
class Seen:
    """What there was in the end."""

    counted: Counter[str]
    """Bytes by team, as the proxy's metrics have them."""
    rows: dict[str, dict[str, str]]
    """The report's table by team."""
    page: Path


def measure(frame: Frame, _megabytes: int | None, brief: bool) -> Seen:
    """Run broker, proxy, and the four clients for a minute; then make the report."""
    screen, run_s = frame.screen, BRIEF_RUN_S if brief else RUN_S
    records = RECORDS * run_s // RUN_S

    def prepare(broker: str) -> None:
        screen.step(f"Topics orders and clicks: {records * RECORD_BYTES // MIB} MiB each")
        make_topics(broker, [*QUERIES.values()], PARTITIONS)
        producer = KafkaProducer(bootstrap_servers=broker, batch_size=4 * RECORD_BYTES)
        for number in range(records):
            for topic in QUERIES.values():
                producer.send(topic, bytes(RECORD_BYTES), partition=number % PARTITIONS)
        producer.close()

    with servers(frame, CONFIG, prepare) as running:
        _use(frame, running, run_s)
        time.sleep(SETTLE_S)
        counted = _counted(running.admin_url)
        screen.step("The report is made by `quota-proxy usage report`")
        _report(frame.out_dir)
    with (frame.out_dir / "usage.csv").open(newline="", encoding="utf-8") as file:
        rows = {row["team"]: row for row in csv.DictReader(file)}
    return Seen(counted, rows, frame.out_dir / "usage.html")


def _use(frame: Frame, running: Servers, run_s: int) -> None:
    """Let all four read for so many seconds."""
    where = {"bootstrap": running.bootstrap}
    own = {"jars": ",".join(map(str, connector_jars())), "work_dir": str(frame.work_dir)}
    spans = {name: [0.0, float(run_s)] for name in QUERIES}
    frame.screen.step(f"Spark starts for {' and '.join(QUERIES)}")
    with frame.start(
        "queries", "queries", "day", spans=spans, topics=QUERIES, **where, **own
    ) as queries:
        queries.wait_for(lambda: queries.said() or None, "started", trial.START_TIMEOUT_S)
        with (
            frame.start(
                *(BACKFILL, "neighbour"),
                client_id=BACKFILL,
                topic="orders",
                bytes_per_second=PACES[BACKFILL],
                **where,
            ) as backfill,
            frame.start(
                *(NOTEBOOK, "neighbour"),
                client_id=NOTEBOOK,
                topic="clicks",
                bytes_per_second=PACES[NOTEBOOK],
                **where,
            ) as notebook,
        ):
            Path(frame.work_dir, DAY_GO_FILE).touch()
            frame.screen.step(f"All four read, for {run_s} s")
            for _ in range(run_s):
                time.sleep(1)
                for child in (queries, backfill, notebook):
                    child.require_running()


def _counted(admin_url: str) -> Counter[str]:
    """Return the bytes of each team so far."""
    with urllib.request.urlopen(f"{admin_url}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    counted: Counter[str] = Counter()
    for match in filter(None, map(_MOVED.match, lines)):
        counted[TEAM_OF.get(match[1], "no team")] += int(float(match[2]))
    return counted


def _report(out_dir: Path) -> None:
    """Make the report as a user does; raises DemoError with what it says if it fails."""
    shutil.copy(CHECKOUT / "examples" / "demo" / TEAMS, out_dir)
    jars = ",".join(map(str, connector_jars()))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "proxy", "usage", "report", "-c", out_dir / CONFIG),
            *("--days", "2", "--teams", out_dir / TEAMS, "--out", out_dir),
            *("--set", f"spark.jars={jars}"),  # fetched already
        ],
        capture_output=True,
        text=True,
        timeout=REPORT_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise DemoError(f"The report was not made: {done.stderr}", "See the logs.")


def conclude(console: Console, seen: Seen) -> int:
    """Compare the report with the proxy's own counters."""
    sums = {
        team: int(row["read_bytes"]) + int(row["written_bytes"]) for team, row in seen.rows.items()
    }
    for team, row in seen.rows.items():
        held = float(row["held_seconds"])
        console.print(
            f"  {team:14}{sums[team] / MIB:8.1f} MiB  {float(row['cost']):.4f} {row['currency']}"
            f"  p99 {int(row['read_p99']) / MIB:.2f} MiB/s  held {held:.0f} s"
        )
    console.print(f"  {seen.page}")
    claims = [
        trial.Claim(
            f"{team} has the bytes that the proxy counted",
            f"{sums.get(team, 0):,} of {seen.counted[team]:,}",
            sums.get(team) == seen.counted[team],
        )
        for team in TEAM_OF.values()
    ]
    return trial.summarise(console, claims)


def draw(seen: Seen, path: Path) -> None:
    """Draw how much each team has read, and what that costs."""
    teams = sorted(TEAM_OF.values(), key=lambda team: int(seen.rows[team]["read_bytes"]))
    sizes = [int(seen.rows[team]["read_bytes"]) / MIB for team in teams]
    with canvas.picture(path, "Who used what, in a minute", (1,)) as axes:
        colours = [FREE_COLOUR] * (len(teams) - 1) + [MAIN_COLOUR]
        bars = axes.barh(teams, sizes, color=colours)
        costs = (f" {float(seen.rows[team]['cost']):.4f} EUR" for team in teams)
        axes.bar_label(bars, labels=[*costs])
        axes.set(xlabel="MiB read", xlim=(0, 1.2 * max(sizes)))


SCENARIO = Scenario(Path("build/demo-usage"), "usage.png", measure, draw, conclude)
