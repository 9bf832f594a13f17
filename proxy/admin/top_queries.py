"""Draws the Structured Streaming queries of the status document for the terminal."""

from collections.abc import Sequence

from proxy.admin.top_table import Column, Document, figure

ALARM, CALM = "bold red", ""
FAILED = "failed"

COLUMNS = (
    Column("query", ratio=3),
    Column("state", ratio=3),
    Column("lag", justify="right"),
    Column("in flight", from_width=120, justify="right"),
    Column("batch", justify="right"),
    Column("rows", from_width=120, justify="right"),
    Column("records/s", justify="right"),
    Column("why", from_width=150, ratio=5),
    Column("commit", from_width=70),
)


def query_rows(queries: Sequence[Document]) -> list[tuple[tuple[str, ...], str]]:
    """Return for each query one text for each of `COLUMNS`, and a style."""
    return [(_cells(query), ALARM if alarms(query) else CALM) for query in queries]


def alarms(query: Document) -> list[str]:
    """Return what needs somebody: a failure, partitions that are stuck, commits that fail."""
    commit = query["commit"]
    return [
        *(["failed"] if query["state"] == FAILED else []),
        *([f"{query['stuck_partitions']} stuck"] if query["stuck_partitions"] else []),
        *(["not committed"] if commit and not commit["ok"] else []),
    ]


def _cells(query: Document) -> tuple[str, ...]:
    batch, adaptive = query["batch"], query["adaptive"]
    return (
        query["name"],
        _state(query),
        _lag(query),
        figure(query["in_flight_records"]),
        _seconds(batch and batch["duration_s"]),
        figure(batch and batch["rows"]),
        figure(adaptive and adaptive["rate"]),
        (adaptive and adaptive["reason"]) or "-",
        _commit(query["commit"]),
    )


def _state(query: Document) -> str:
    state, skipped, advice = query["state"], query["skipped_records"], query["advice"]
    parts = [] if state == FAILED else [state]
    parts += alarms(query)
    parts += [f"{skipped:,} skipped"] if skipped else []
    parts += [f"{len(advice)} to mend"] if advice else []
    return ", ".join(parts)


def _lag(query: Document) -> str:
    if query["lag_records"] is None:
        return "-"
    return f"{query['lag_records']:,} {_seconds(query['lag_s'])}"


def _commit(commit: Document | None) -> str:
    if commit is None:
        return "-"
    if not commit["ok"]:
        return "FAILS"
    return "ok" if commit["ago_s"] is not None else "none yet"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
