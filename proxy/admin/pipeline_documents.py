"""Pipelines as documents: each with its nodes and its ledger, in full and briefly."""

from collections.abc import Sequence
from dataclasses import asdict
from heapq import nlargest
from itertools import islice
from operator import itemgetter

from proxy.admin.document_models import Column, DocumentModel, RowContext, clipped, picked
from proxy.pipeline.completion import CompletionTracker
from proxy.pipeline.ledger import TIMED_OUT
from proxy.pipeline.nodes import NodeController, Stage, delay_ms
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.state import Document

MAX_PIPELINE_SUMMARIES = 50  # pipelines in the status document
MAX_NODES = 50  # stages, and also sources, of one pipeline there
MAX_PENDING_SHOWN = 100  # source batches of one pipeline, those that came first
REDUCED = "reduced"  # state of a node that is held to a rate


def _pending(completion: CompletionTracker, now: RowContext) -> Document:
    ledger, limit, to_s = completion.ledger, completion.limit, completion.wall.to_s
    first = list(islice(ledger.pending(), MAX_PENDING_SHOWN))
    waits_at = completion.waits_at(root for root, *_ in first)
    return {
        "batches": ledger.pending_batches,
        "size_bytes": ledger.pending_bytes,
        "max_batches": limit.batches,
        "max_bytes": limit.size_bytes,
        "full": completion.is_full(),
        "first": [
            {
                "root": f"{root:016x}",
                **asdict(owner),
                "started_s": to_s(entry.started_ms),
                "age_s": to_s(now.now_ms) - to_s(entry.started_ms),
                "waits_at": waits_at.get(root),
            }
            for root, entry, owner in first
        ],
    }


COMPLETION = DocumentModel[CompletionTracker](
    """
    completed, timed_out, failed: how many were; the last by reason
    pending: source batches in flight: `batches` of `max_batches`, `size_bytes` of `max_bytes`,
        whether it is `full`; `first` has the 100 that came first, each with `root`, `stage`,
        `batch`, `size_bytes`, `started_s`, `age_s` and the stage where it `waits_at`
    early_batches, forced_batches, dropped_batches: reported before what they read, taken all the
        same, and those of stages that have gone meanwhile
    edges, max_edges: what waits in the ledger, and the most that may
    counts, notes: what was unusual in the ledger: `late_acks`, `repeated_records`,
        `foreign_records`, `unanchored_ranges`, `ownerless`, `unknown_stages`, `unknown_topics`,
        `repeated_inits`, `unknown_fails`; and up to 100 texts
    """,
    {
        "completed": lambda each, _: each.ledger.outcomes[""],
        "timed_out": lambda each, _: each.ledger.outcomes[TIMED_OUT],
        "failed": lambda each, _: {
            why: count for why, count in each.ledger.outcomes.items() if why not in ("", TIMED_OUT)
        },
        "pending": _pending,
        "early_batches": lambda each, _: len(each.early),
        "edges": "edges.size",
        "counts": lambda each, _: asdict(each.counts),
        "notes": lambda each, _: [{"at_s": at_s, "text": text} for at_s, text in each.notes],
    },
)

NODE = DocumentModel[NodeController](
    """
    name, state, rate, normal_rate: `uncontrolled`, or `reduced` to so many records/s; and its own
        rate
    held_by: the stages that asked for it; with none of them left it is released step by step
    t_delay_ms: what each record is delayed, on average, at that rate
    measured_rate: records/s that a stage was sent, or a source sent, in its last period; `null`
        when not known
    last_change: `at_s`, `direction`, `by` whom, `reason`
    """,
    {
        "state": lambda node, _: "uncontrolled" if node.state.rate is None else REDUCED,
        "rate": "state.rate",
        "held_by": "state.holders",
        "t_delay_ms": lambda node, _: delay_ms(
            node.normal_rate, node.state.rate or node.normal_rate
        ),
        "last_change": lambda node, _: (
            {
                **{"at_s": node.state.since_s, "reason": node.state.why},
                **picked(node.state, "direction", "by"),
            }
            if node.state.revision
            else None
        ),
    },
    columns=(
        Column("pipeline", "title", ratio=3, is_name=True),
        Column("state", "shown_state", ratio=4),
        Column("rate", "rate", "count"),
        Column("normal", "normal_rate", "count", 100),
        Column("received", "received_rate", "count", 120),
        Column("processed", "processing_rate", "count", 70),
        Column("lag", "lag", "count"),
        Column("why", "why", from_width=130, ratio=6),
    ),
)
"""Of stages and sources; rates in records/s."""

STAGE = DocumentModel[Stage](
    """
    name, state, rate, normal_rate, held_by, t_delay_ms, measured_rate, last_change: as of a source
    waits: `null`, or `for` which stage it waits, how many `records` its next batch may have, and
        the `reason`. `max_lag` and `max_pending` are
        [bounds](pipelines.md#what-is-a-bound-and-what-is-a-target), rates and bands are targets
    upstream: the stages and sources whose topics it consumes
    received_rate, processing_rate, lag: what it is sent and processes (records/s), how many records
        wait
    band, band_in_force, samples: its band, and that at the rate that it is held to; samples of the
        last period: `count`, `above` and `below` it
    last_request: what it asked of those before it: `at_s`, `direction`, `processing_rate`,
        `reason`, and whom it `asked`
    alive: `false` after 5 minutes without a report, and when the query has ended: it asks nothing
        then; bounds are kept all the same
    """,
    {
        "waits": lambda stage, _: (
            stage.waits
            and {"for": stage.waits.waits_for, **picked(stage.waits, "records", "reason")}
        ),
        "received_rate": "last.received_rate",
        "lag": "last.lag",
        "band": "settings.band",
        "band_in_force": lambda stage, _: [edge * stage.scale for edge in stage.settings.band],
        "samples": lambda stage, _: {
            "count": stage.last.samples,
            **picked(stage.last, "above", "below"),
        },
        "alive": lambda stage, now: stage.is_alive(now.now_ms),
    },
    like=NODE,
)

PIPELINE_ROW = DocumentModel[RunningPipeline](
    """
    name, at_s, hold_producers, max_lag: the pipeline, when this was so, and what its configuration
        says
    stages, sources: its nodes; sources are producers, `uncontrolled` without `hold_producers`
    events: what was held and released, up to 100, the latest last: `at_s`, `node`, `rate`, `reason`
    refused_readings, unknown: 0 and empty, for those who read the fields of earlier versions
    completion: of source batches, since the proxy started
    """,
    {
        "at_s": lambda each, now: each.completion.wall.to_s(now.now_ms),
        "hold_producers": "graph.settings.hold_producers",
        "max_lag": "graph.settings.max_lag",
        "stages": lambda each, now: [
            {**STAGE.document(each.stages[name], now), "upstream": each.graph.upstream[name]}
            for name in each.graph.order
        ],
        "sources": lambda each, now: [
            NODE.document(each.nodes.get(source.name) or NodeController(source), now)
            for source in each.graph.settings.sources
        ],
        "events": lambda each, _: list(each.events),
        "refused_readings": lambda *_: 0,
        "unknown": lambda *_: [],
        "completion": lambda each, now: COMPLETION.document(each.completion, now),
    },
)


def pipeline_urgency(pipeline: Document) -> tuple[bool, int]:
    """Return what puts a pipeline of the status before others: full, then what is held."""
    nodes = (*pipeline["sources"], *pipeline["stages"])
    return pipeline["pending"]["full"], sum(map(is_node_held, nodes))


def is_node_held(node: Document) -> bool:
    """Return whether a node is held to a rate, or waits for room."""
    return bool(node["state"] == REDUCED or node.get("waits"))


def pipeline_summary(document: Document) -> Document:
    """Return a pipeline briefly, with at most MAX_NODES stages and as many sources."""
    completion = document["completion"]
    pending = completion["pending"]
    oldest = min(pending["first"], key=itemgetter("started_s"), default=None)
    stage_fields = "upstream", "alive", "received_rate", "processing_rate", "lag", "waits"
    return {
        "name": document["name"],
        "sources": [_node(node) for node in _shown(document["sources"])],
        "stages": [
            {**_node(each), **picked(each, *stage_fields)} for each in _shown(document["stages"])
        ],
        "stages_total": len(document["stages"]),
        "pending": {key: value for key, value in pending.items() if key != "first"},
        "failed": sum(completion["failed"].values()),
        **picked(completion, "completed", "timed_out"),
        "oldest": oldest and picked(oldest, "stage", "batch", "waits_at", "started_s", "age_s"),
    }


def _shown(nodes: Sequence[Document]) -> Sequence[Document]:
    """Return at most MAX_NODES, in their order; held ones are left off last."""
    numbers = nlargest(MAX_NODES, range(len(nodes)), key=lambda number: is_node_held(nodes[number]))
    return [nodes[number] for number in sorted(numbers)]


def _node(node: Document) -> Document:
    change = node["last_change"]
    return {
        **picked(node, "name", "state", "rate", "normal_rate", "measured_rate", "held_by"),
        "reason": change and clipped(change["reason"]),
        "since_s": change and change["at_s"],
    }
