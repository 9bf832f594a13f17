"""What queries did in a demo that is about time, and what was promised of it."""

import json
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from rich.console import Console
from rich.table import Table

from metrics.clock import MS_PER_SECOND
from proxy.demo import DemoError

HTTP_TIMEOUT_S = 5.0

EXIT_DONE, EXIT_FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Timing:
    """How long each part of a run takes, in seconds."""

    fast_s: float
    slow_s: float
    again_s: float

    @property
    def total_s(self) -> float:
        """The time for which records are written."""
        return self.fast_s + self.slow_s + self.again_s


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch; times in seconds since the epoch."""

    started_s: float
    rows: int
    duration_s: float

    @property
    def ended_s(self) -> float:
        """When it was done."""
        return self.started_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Phase:
    """When processing was slow, in seconds since the epoch."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What the proxy said at one moment."""

    at_s: float
    lag: Mapping[str, int]
    """By query, records that it has not completed."""
    is_held: bool
    """Whether a query is held back for another one."""


S = TypeVar("S", bound=Sample)


@dataclass(frozen=True, slots=True)
class Outcome(Generic[S]):
    """What a run gave."""

    batches: Mapping[str, Sequence[Batch]]
    """By query."""
    samples: Sequence[S]
    slow: Phase
    rows_in: int
    rows_out: Mapping[str, tuple[int, int]]
    """By query, of those that were counted: rows, and different ones among them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A promise, and what was seen."""

    text: str
    seen: str
    holds: bool


def batches_of(lines: Iterable[dict[str, Any]], query: str) -> list[Batch]:
    """Return the batches that a query printed."""
    return [
        Batch(
            datetime.fromisoformat(line["started"]).timestamp(),
            line["rows"],
            line["duration_ms"] / MS_PER_SECOND,
        )
        for line in lines
        if line.get("query") == query and "batch" in line
    ]


def rows_out_of(lines: Iterable[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return by query how many rows it wrote, and how many different ones."""
    return {
        line["query"]: (line["rows_out"], line["distinct_rows_out"])
        for line in lines
        if "rows_out" in line
    }


def judge_rows(outcome: Outcome[S], queries: int) -> Claim:
    """Compare what so many queries wrote with what was written for them."""
    rows_in, rows_out = outcome.rows_in, outcome.rows_out
    once = all(rows == (rows_in, rows_in) for rows in rows_out.values())
    return Claim(
        f"each of {rows_in:,} rows exactly once",
        ", ".join(f"{name}: {rows:,}" for name, (rows, _) in rows_out.items()),
        once and rows_in > 0 and len(rows_out) == queries,
    )


def read_text(url: str) -> str:
    """Read what the proxy answers. Raises DemoError."""
    try:
        with urllib.request.urlopen(url, timeout=HTTP_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        raise DemoError(
            f"The proxy does not answer {url}: {error}", "Read its log, proxy.log."
        ) from error


def progress(admin_url: str) -> list[dict[str, Any]]:
    """Return what the proxy knows of each query; docs/api.md has the form. Raises DemoError."""
    queries: list[dict[str, Any]] = json.loads(read_text(f"{admin_url}/v1/progress"))["queries"]
    return queries


def lag_of(queries: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Return by query how many records it has not completed, from `progress`."""
    return {
        query["name"]: sum(part["lag_records"] or 0 for part in query["partitions"])
        for query in queries
    }


def summarise(console: Console, claims: Sequence[Claim]) -> int:
    """Show the promises, and which were kept; return the exit code, 0 when all were."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("promise", "seen", ""):
        table.add_column(title)
    for claim in claims:
        verdict, style = ("holds", "green") if claim.holds else ("DOES NOT HOLD", "bold red")
        table.add_row(claim.text, claim.seen, f"[{style}]{verdict}[/]")
    console.print()
    console.print(table)
    console.print()
    return EXIT_DONE if all(claim.holds for claim in claims) else EXIT_FAILED
