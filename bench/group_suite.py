"""Part of the figure `groups`: franz-go's own test of consumer groups on all ways at once.

`TestGroupETL` chains groups whose members come and go, and fails when a record comes twice, is
missing or out of order. Its records are few enough that a run at the bound takes some minutes.
"""

import re
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.golang import build_tests, version_of
from bench.group_ways import Brokers, Way
from bench.lab import Lab
from bench.processes import BenchError, Child
from bench.report import Row, Verdict

FIGURE = "groups"
LIBRARY = "github.com/twmb/franz-go"
PACKAGE = f"{LIBRARY}/pkg/kgo"
TEST = "TestGroupETL"
WHAT = f"franz-go's {TEST}: runs that pass"
TARGET = "no fewer than with Kafka's own quota"
FULL_RECORDS = 100_000
QUICK_RECORDS = 20_000
FULL_RUNS = 3
QUICK_RUNS = 1
# With Kafka's own quota a run takes 160 s on a busy machine.
RUN_TIMEOUT_S = 240
# The program ends itself at its timeout, with a trace of what it waited for.
ANSWER_MARGIN_S = 30.0
ENDS = ("PASS", "FAIL")
# The line that says best why a run failed: the first match of the first pattern that has one.
FAILURES = tuple(
    re.compile(pattern)
    for pattern in (
        r"sendErr group=\S+: (?!848 stale)(.*)",
        r"_test\.go:\d+: (?!deleting|FAILED|pre-KIP|\S+ completed)(.*)",
        r"panic: (.*)",
        r"(--- FAIL: .*)",
    )
)
# Of a topic or group.
RANDOM_NAME = re.compile(r"[0-9a-f]{40,}")
# What a failed run printed is kept there.
LOGS = Path("build/groups")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the test: whether it passed, its time in seconds, and why it failed if it did."""

    passed: bool
    took_s: float
    reason: str


def measure(lab: Lab, go: str, brokers: Brokers, quick: bool) -> list[Row]:
    """Run the test on all ways at once, some times over, and give the rows of each way."""
    runs_each, records = (QUICK_RUNS, QUICK_RECORDS) if quick else (FULL_RUNS, FULL_RECORDS)
    program = build_tests(go, PACKAGE, lab.work_dir / "suite")
    ways = brokers.ways(lab)
    runs: dict[str, list[Run]] = {way.mode: [] for way in ways}
    for number in range(1, 1 + runs_each):
        for way, run in zip(ways, _run(lab, program, ways, number, records), strict=True):
            runs[way.mode].append(run)
    own = sum(run.passed for way in ways if way.is_own for run in runs[way.mode])
    return [row for way in ways for row in _rows(way, runs[way.mode], own)]


def _run(lab: Lab, program: Path, ways: Sequence[Way], number: int, records: int) -> list[Run]:
    """Run the test once on each way, side by side."""
    children = [lab.start_helper("suite", _command(program, way, records)) for way in ways]
    logs = [LOGS / f"{way.mode}-{number}.log" for way in ways]
    # Each is read by a thread: one that nobody reads would stop when its pipe is full.
    with ThreadPoolExecutor(len(ways)) as pool:
        return list(pool.map(_outcome, children, logs))


def _command(program: Path, way: Way, records: int) -> list[str]:
    settings = {
        "KGO_SEEDS": way.bootstrap,
        "KGO_TEST_RF": "1",
        "KGO_TEST_RECORDS": str(records),
    }
    return [
        shutil.which("env") or "/usr/bin/env",
        *(f"{name}={value}" for name, value in settings.items()),
        str(program),
        f"-test.run=^{TEST}$",
        f"-test.timeout={RUN_TIMEOUT_S}s",
        "-test.v",
    ]


def _outcome(child: Child, log: Path) -> Run:
    """Wait until the test has ended; what it printed is kept in `log` if it failed."""
    lines: list[str] = []

    def ends(line: str) -> bool:
        lines.append(line)
        return line in ENDS

    started_s = time.monotonic()
    try:
        passed = child.wait_line(ends, RUN_TIMEOUT_S + ANSWER_MARGIN_S) == "PASS"
    except BenchError:
        passed = False
    took_s = time.monotonic() - started_s
    log.unlink(missing_ok=True)
    if passed:
        return Run(True, took_s, "")
    printed = "\n".join(lines) + "\n" + child.log_path.read_text(errors="replace")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(printed)
    return Run(False, took_s, _reason(printed))


def _reason(printed: str) -> str:
    found = (pattern.search(printed) for pattern in FAILURES)
    reason = next((match[1] for match in found if match), "it ended without saying why")
    return RANDOM_NAME.sub("…", reason)


def _rows(way: Way, runs: Sequence[Run], own: int) -> list[Row]:
    passed = sum(run.passed for run in runs)
    is_own = way.is_own
    measured = f"{passed} of {len(runs)}" + ("" if is_own else f" ({own} with Kafka's own)")
    samples: dict[str, object] = {
        "runs": [asdict(run) for run in runs],
        "library": f"{LIBRARY} {version_of(LIBRARY)}",
        "holds": str(way.holds()),
        "fetch_versions": way.fetch_versions(),
    }
    rows = [
        Row(
            FIGURE,
            f"{WHAT}, {way.name}",
            "" if is_own else TARGET,
            measured,
            Verdict.INFO if is_own else Verdict.of(passed >= own),
            samples,
        ),
        Row(FIGURE, "  time of each run", "", _times(way, runs), Verdict.INFO),
    ]
    reasons = dict.fromkeys(run.reason for run in runs if not run.passed)
    return rows + [Row(FIGURE, "  failed with", "", text, Verdict.INFO) for text in reasons]


def _times(way: Way, runs: Sequence[Run]) -> str:
    text = ", ".join(f"{run.took_s:.0f} s" for run in runs)
    versions = way.fetch_versions()
    if versions is None:
        return text
    return f"{text}; Fetch version {', '.join(sorted(versions, key=int))}; {way.holds()}"
