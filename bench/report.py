"""What a bench run hands out: rows with verdicts as a table, raw samples as JSON."""

import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

PACKAGES = ("kafka-quota-proxy", "kafka-python", "uvloop", "pyspark", "confluent-kafka")
VERSION_TIMEOUT_S = 20.0
COLOURS = {"met": "green", "missed": "red", "failed": "red", "not measured": "yellow", "info": ""}


class Verdict(StrEnum):
    """How a measured figure stands to its target."""

    MET = "met"
    MISSED = "missed"
    FAILED = "failed"
    NOT_MEASURED = "not measured"
    INFO = "info"

    @classmethod
    def of(cls, reached: bool) -> "Verdict":
        """MET or MISSED."""
        return cls.MET if reached else cls.MISSED


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        figure: name of the figure that it belongs to.
        what: what was measured.
        target: the target in words, empty when there is none.
        measured: the result in words.
        samples: raw figures behind it, for the JSON file.

    """

    figure: str
    what: str
    target: str
    measured: str
    verdict: Verdict
    samples: dict[str, object] = field(default_factory=dict)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print all rows."""
    table = Table("figure", "what", "target", "measured", "verdict", title="quota-proxy bench")
    previous = ""
    for row in rows:
        if previous and row.figure != previous:
            table.add_section()
        colour = COLOURS[row.verdict]
        verdict = f"[{colour}]{row.verdict}[/]" if colour else str(row.verdict)
        name = "" if row.figure == previous else row.figure
        table.add_row(name, row.what, row.target, row.measured, verdict)
        previous = row.figure
    console.print(table)


def write_json(path: Path, rows: Sequence[Row], options: dict[str, object]) -> None:
    """Write rows, machine and options; the file is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "options": options,
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


def machine() -> dict[str, object]:
    """Facts about where the figures come from."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "kernel": platform.release(),
        "congestion_control": _congestion_control(),
        "python": platform.python_version(),
        "haproxy": _first_line("haproxy", "-v"),
        "java": _first_line("java", "-version"),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _congestion_control() -> str | None:
    """Return how TCP paces itself: bbr does so on the loopback interface, too."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _first_line(program: str, option: str) -> str | None:
    found = shutil.which(program)
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, option],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # `java -version` writes to stderr.
    return next(iter((done.stdout or done.stderr).splitlines()), None)
