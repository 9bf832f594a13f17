"""Makes the report of some days from what `usage_stream` has stored: a page, a table, and rules.

    spark-submit usage_report.py --parquet s3a://bucket/usage --days 30 --teams teams.yaml --out DIR

In a notebook `write_report` does the same, and `figures_of` gives the figures alone.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, timedelta, timezone
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path

if __name__ == "__main__" and not __package__:  # by spark-submit: the package is the folder around
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "usage"

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as Spark's own documentation has it

from .command_line import UsageInputError, run_program
from .record_frames import RECORDS_FOLDER, REJECTED_FOLDER, read_days, stored_days
from .teams import NO_TEAM, Teams, read_teams
from .usage_figures import (
    PERCENTILES,
    DateRange,
    UsageClient,
    UsageFigures,
    UsageTotals,
    figures_of,
)
from .usage_page import cost_words, cut_name, html_of, size_words

TABLE_FILE, PAGE_FILE, RULES_FILE = "usage.csv", "usage.html", "suggested-rules.yaml"
DEFAULT_DAYS, MOST_DAYS = 30, 3660
NAMES_TOLD, TEAMS_TOLD = 5, 20
CLOCK_TOLERANCE_MS = 60_000
_FORMULA = ("=", "+", "-", "@", "\t", "\r")

RULE_HEADROOM = 1.5  # of the p99: what a bound is before it is rounded up
LEAST_BOUND = 100 * 1024  # no bound is lower: it lets a few record batches through in a second
BOUND_KEYS = {"read": "consumer_byte_rate", "write": "producer_byte_rate"}
KIBIBYTE, BOUND_UNITS = 1024, ("KiB", "MiB", "GiB")
TWO_DIGITS = Context(prec=2, rounding=ROUND_CEILING)


def today() -> date:
    """Return the day it is in UTC."""
    return datetime.now(timezone.utc).date()  # noqa: UP017 - drivers may have Python 3.9


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which days, which teams, and where the report goes."""
    days_help = f"so many, up to today or --to (default: {DEFAULT_DAYS})"
    parser.add_argument("--days", type=int, help=days_help)
    parser.add_argument("--from", dest="first", type=_day, metavar="DATE", help="the first day")
    to_help = "the last day (default: today); days are in UTC"
    parser.add_argument("--to", dest="last", type=_day, metavar="DATE", help=to_help)
    teams_help = "YAML file that says whose clients are (default: each is its own team)"
    parser.add_argument("--teams", type=Path, metavar="FILE", help=teams_help)
    out_help = f"folder for {TABLE_FILE}, {PAGE_FILE} and {RULES_FILE}"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=out_help)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a day such as 2026-11-26") from None


def date_range_of(given: argparse.Namespace) -> DateRange:
    """Return the days that the options name. Raises UsageInputError for none, or too many."""
    last = given.last or today()
    if given.first is not None and given.days is not None:
        raise UsageInputError("--days and --from: both say where to begin; fix: leave one out")
    days = DEFAULT_DAYS if given.days is None else given.days
    first = given.first
    if first is None:
        if not 1 <= days <= MOST_DAYS:
            raise UsageInputError(f"--days {days}: write a number from 1 to {MOST_DAYS}")
        first = last - timedelta(days - 1)
    if not first <= last <= first + timedelta(MOST_DAYS):
        fix = f"begin before the end, and at most {MOST_DAYS} days"
        raise UsageInputError(f"from {first} to {last}: no span of days; fix: {fix}")
    return DateRange(first, last)


def prepare_out(out: Path) -> None:
    """Make the folder for the report. Raises UsageInputError if it can't be."""
    problem = "it may not be written to"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if os.access(out, os.W_OK):
            return
    except OSError as error:
        problem = error.strerror or str(error)
    raise UsageInputError(f"--out {out}: {problem}; fix: name a folder that may be written to")


def write_report(
    spark: SparkSession,
    folder: str,
    span: DateRange,
    out: Path,
    teams: Teams | None = None,
    rules: Iterable[str] = (),
) -> tuple[UsageFigures, list[str]]:
    """Write the three files; return the figures, and what is to be known of them.

    Args:
        spark: the session.
        folder: what `usage_stream` writes to.
        span: the days to add up.
        out: a folder of the driver's that is there.
        teams: without, each client is its own team.
        rules: the names of those in force, of which some may be unused.

    Raises UsageInputError where there is nothing to add up.

    """
    records = read_days(spark, folder, RECORDS_FOLDER, span.days)
    if records is None:
        raise UsageInputError(_nothing(spark, folder, span))
    figures = figures_of(records, span, teams, rules)
    notes = [*_notes(spark, folder, figures, teams)]
    made_at = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")  # noqa: UP017
    with (out / TABLE_FILE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(UsageTotals._fields)
        table.writerows(map(_cells, figures.teams))
    (out / PAGE_FILE).write_text(html_of(figures, notes, made_at), encoding="utf-8")
    lines = "".join(f"{line}\n" for line in suggestion_lines(figures))
    (out / RULES_FILE).write_text(lines, encoding="utf-8")
    return figures, notes


def _cells(team: UsageTotals) -> Iterator[object]:
    """Yield the cells of a row: a name that clients chose is no formula for a spreadsheet."""
    for value in team:
        if isinstance(value, str) and value.startswith(_FORMULA):
            yield f"'{value}"
        else:
            yield "" if value is None else value


def rounded_bound(rate: float) -> str:
    """Return the next size of two digits that is no lower than a rate in bytes per second."""
    size = Decimal(max(rate, LEAST_BOUND)) / KIBIBYTE
    for unit in BOUND_UNITS:
        rounded = TWO_DIGITS.plus(size)
        if rounded < KIBIBYTE or unit == BOUND_UNITS[-1]:
            break
        size = max(size / KIBIBYTE, Decimal(1))  # at least one digit stands before the point
    return f"{rounded.normalize():f}{unit}"


def suggestion_lines(figures: UsageFigures) -> Iterator[str]:
    """Yield the lines of a `quotas` section, with the figures behind each rule as comments."""
    yield f"# Suggested from what passed from {figures.span.first} to {figures.span.last}."
    yield f"# A bound is the p99 of the client's rates, times {RULE_HEADROOM:g}, up to two digits."
    yield "# A rate is that of 10 s with traffic; percentiles are at most 5 % high."
    yield "# What goes over a bound waits: see whether a peak is worth a higher one."
    yield "# To try the rules without holding anybody, write throttle: {enforce: false}."
    named = [each for each in figures.clients if _can_be_named(each)]
    if left_off := len(figures.clients) - len(named):
        yield f"# Left off: {left_off} clients whose name is hashed, or none of their own."
    yield "quotas:"
    yield "  rules:" if named else "  rules: []"
    for usage in named:
        client, rates = UsageClient.of(usage.team), usage._asdict()
        keys = {"user": client.user} if client.user else {}
        keys["client-id-prefix" if client.is_prefix else "client-id"] = client.name
        lines = [f"{key}: {_yaml_text(value)}" for key, value in keys.items()]
        lines += ["scope: shared"] if client.is_prefix else []
        yield ""
        for direction, bound in BOUND_KEYS.items():
            if rates[f"{direction}_p99"]:
                names = (*PERCENTILES, "peak")
                seen = ", ".join(f"{name} {rates[f'{direction}_{name}']}" for name in names)
                yield f"    # {bound}: {seen} bytes/s"
                most = rates[f"{direction}_p99"] * RULE_HEADROOM
                lines.append(f"{bound}: {rounded_bound(most)}")
        for number, line in enumerate(lines):
            yield f"    {' ' if number else '-'} {line}"


def _can_be_named(usage: UsageTotals) -> bool:
    name = UsageClient.of(usage.team).name
    return name not in ("", "<default>") and not usage.hashed and usage.busy_seconds > 0


def _yaml_text(text: str) -> str:
    """Write text in quotes: nothing in it ends the line or is not seen."""
    escaped = (
        f"\\{char}" if char in '"\\' else char if char.isprintable() else f"\\U{ord(char):08X}"
        for char in text
    )
    return f'"{"".join(escaped)}"'


def _nothing(spark: SparkSession, folder: str, span: DateRange) -> str:
    """Return why there is nothing to add up."""
    days = stored_days(spark, folder, RECORDS_FOLDER)
    what = f"{folder}: no usage records from {span.first} to {span.last}"
    if days:
        return f"{what}; fix: choose days from {days[0]} to {days[-1]}"
    refused = read_days(spark, folder, REJECTED_FOLDER, stored_days(spark, folder, REJECTED_FOLDER))
    if refused is None:
        return f"{what}, nor of other days; fix: name the folder or the topic that has them"
    row = refused.agg(F.count("*").alias("count"), F.min("topic").alias("topic")).first()
    reasons = _reasons(refused)
    return (
        f"{what}: all {row['count']} messages of topic {row['topic']!r} were rejected ({reasons}); "
        "fix: name the topic that `usage.topic` of the proxy names"
    )


def _reasons(refused: DataFrame) -> str:
    counts = refused.groupBy("reason").count().orderBy("reason").collect()
    return ", ".join(f"{row['count']} {row['reason']}" for row in counts)


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - NAMES_TOLD} more" if len(values) > NAMES_TOLD else ""
    return ", ".join(map(str, values[:NAMES_TOLD])) + more


def _notes(
    spark: SparkSession, folder: str, figures: UsageFigures, teams: Teams | None
) -> Iterator[str]:
    """Yield what may make a reader take the figures for more than they are."""
    span, doubtful = figures.span, figures.doubtful
    total = sum(each.bytes for each in figures.teams)
    if teams is None:
        yield "No teams were given: each client is its own team, and nothing has a cost."
    elif teams.prices is None:
        yield "The teams' file lacks prices.read_per_gib or prices.write_per_gib: no cost is given."
    remainder = sum(each.bytes for each in figures.teams if each.team == NO_TEAM)
    if teams is not None and remainder:
        share = remainder / total
        yield f"{size_words(remainder)} ({share:.1%}) are of no team in the file: see {NO_TEAM!r}."
    if doubtful["claimed"]:
        yield (
            f"{size_words(doubtful['claimed'])} fit entries of two teams: the user counts first, "
            "then the client id, its prefix, and the topic."
        )
    empty = [day for day in span.days if day not in figures.by_day and day <= today()]
    if empty:
        yield f"{len(empty)} of {len(span.days)} days have no records at all: {_some(empty)}."
    if span.last >= today():
        yield "The last day is not over: its figures are not complete."
    gaps = [run for run in figures.members if run["lost"] > 0]
    if gaps:
        count = sum(run["lost"] for run in gaps)
        names = _some(sorted({run["member"] for run in gaps}))
        late = ", or not yet there" if span.last >= today() else ""
        yield f"{count} records are missing{late}, by gaps in the numbers of {names}."
    doubled = [run for run in figures.members if run["lost"] < 0]
    if doubled:
        names = _some(sorted({run["member"] for run in doubled}))
        yield (
            f"RECORDS OF {names} ARE THERE TWICE, so sums are too high: more than one query has "
            f"written to {folder}. Copy the topic anew, to an empty folder."
        )
    refused = read_days(spark, folder, REJECTED_FOLDER, span.days)
    if refused is not None and (count := refused.count()):
        yield f"{count} messages were rejected and are in no sum: {_reasons(refused)}."
    hashed = sum(each.hashed for each in figures.teams)
    if hashed:
        yield f"Names are hashed in {hashed} records: the teams' file needs the hashes, too."
    sampled = sum(each.sampled_bytes for each in figures.teams)
    if sampled:
        yield f"Topics of {sampled / max(total, 1):.1%} of the bytes are known by sampling."
    yield from _clocks(spark, folder, figures)


def _clocks(spark: SparkSession, folder: str, figures: UsageFigures) -> Iterator[str]:
    """Yield what clocks that are wrong did to the records."""
    if figures.doubtful["reversed"]:
        count = figures.doubtful["reversed"]
        yield f"{count} records start after their end, as a clock was set: they count by their end."
    now_ms = time.time() * 1000
    ahead = sorted(
        {
            run["member"]
            for run in figures.members
            if max(run["ahead_ms"] or 0, run["latest_ms"] - now_ms) > CLOCK_TOLERANCE_MS
        }
    )
    if ahead:
        yield f"The clocks of {_some(ahead)} are ahead: records end before they were written."
    latest = max(today(), figures.span.last)
    future = [day for day in stored_days(spark, folder, RECORDS_FOLDER) if day > latest]
    if future:
        yield f"Records of days to come are not counted ({_some(future)}): a clock is ahead."


def run_report(arguments: Sequence[str] | None = None) -> int:
    """Make the report on a cluster or on this machine; return the exit code."""
    parser = argparse.ArgumentParser(description="Report who used what, from Parquet files.")
    parquet_help = "folder or URL that usage_stream writes to"
    parser.add_argument("--parquet", required=True, metavar="DIR", help=parquet_help)
    add_report_options(parser)
    return run_program(_run, parser, arguments)


def _run(given: argparse.Namespace) -> None:
    span = date_range_of(given)
    prepare_out(given.out)
    spark = SparkSession.builder.appName("quota-proxy usage report").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    teams = None if given.teams is None else read_teams(spark, given.teams)
    for line in summary_of(*write_report(spark, given.parquet.rstrip("/"), span, given.out, teams)):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{given.out / PAGE_FILE}\n")


def summary_of(figures: UsageFigures, notes: Iterable[str]) -> Iterator[str]:
    """Yield the lines for a terminal: the largest teams, and the notes."""
    for each in figures.teams[:TEAMS_TOLD]:
        sizes = f"read {size_words(each.read_bytes)}, written {size_words(each.written_bytes)}"
        cost = "" if each.cost is None else f", {cost_words(each.cost, each.currency)}"
        yield f"{_printable(cut_name(each.team))}: {sizes}{cost}"
    for note in notes:
        yield f"note: {_printable(note)}"


def _printable(text: str) -> str:
    """Return what does nothing to a terminal: clients chose some of it."""
    return "".join(char if char.isprintable() else "?" for char in text)


if __name__ == "__main__":
    sys.exit(run_report())
