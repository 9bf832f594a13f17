"""Draws the pipelines of the status document for the terminal."""

from collections.abc import Iterator, Sequence

from proxy.admin.pipelines import REDUCED, is_held
from proxy.admin.top_table import Column, Document, figure

HEAD, HELD, CALM = "bold", "yellow", ""

COLUMNS = (
    Column("pipeline", ratio=3),
    Column("state", ratio=4),
    Column("rate", justify="right"),
    Column("normal", from_width=100, justify="right"),
    Column("received", from_width=120, justify="right"),
    Column("processed", from_width=70, justify="right"),
    Column("lag", justify="right"),
    Column("why", from_width=130, ratio=6),
)
"""Rates in records/s."""


def pipeline_rows(pipelines: Sequence[Document]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield for each pipeline and then each of its nodes a text for each of `COLUMNS`, a style."""
    for pipeline in pipelines:
        yield _pipeline_cells(pipeline), HELD if pipeline["pending"]["full"] else HEAD
        for source in pipeline["sources"]:
            state = f"source, {_held(source)}" if source["state"] == REDUCED else "source"
            yield _cells(source, state, source["measured_rate"], None, None), _style(source)
        for stage in pipeline["stages"]:
            state = _held(stage) if is_held(stage) else "not held"
            yield (
                _cells(
                    stage,
                    state if stage["alive"] else f"{state}, silent",
                    stage["received_rate"],
                    stage["processing_rate"],
                    stage["lag"],
                ),
                _style(stage),
            )


def held_nodes(pipelines: Sequence[Document]) -> int:
    """Return how many stages and sources are held."""
    return sum(
        is_held(node)
        for pipeline in pipelines
        for node in (*pipeline["sources"], *pipeline["stages"])
    )


def _style(node: Document) -> str:
    return HELD if is_held(node) else CALM


def _held(node: Document) -> str:
    if node.get("waits"):
        return f"waits for {node['waits']['for']}"
    return f"held by {', '.join(node['held_by'])}" if node["held_by"] else "being released"


def _pipeline_cells(pipeline: Document) -> tuple[str, ...]:
    pending, oldest = pipeline["pending"], pipeline["oldest"]
    most = "" if pending["max_batches"] is None else f" of {pending['max_batches']:,}"
    states = [
        f"{pending['batches']:,}{most} pending",
        *(["FULL"] if pending["full"] else []),
        *(
            f"{pipeline[key]:,} {text}"
            for key, text in (("failed", "failed"), ("timed_out", "timed out"))
            if pipeline[key]
        ),
    ]
    why = f"{pipeline['completed']:,} completed"
    if oldest is not None:
        age = f"{oldest['age_s']:,.0f} s"
        why += f"; batch {oldest['batch']} waits at {oldest['waits_at']}, {age} old"
    return pipeline["name"], ", ".join(states), "", "", "", "", "", why


def _cells(
    node: Document,
    state: str,
    received: float | None,
    processed: float | None,
    lag: int | None,
) -> tuple[str, ...]:
    return (
        f"  {node['name']}",
        state,
        figure(node["rate"]),
        figure(node["normal_rate"]),
        figure(received),
        figure(processed),
        figure(lag),
        (node["waits"]["reason"] if node.get("waits") else is_held(node) and node["reason"]) or "-",
    )
