"""Describes pipelines: in full for `/v1/pipelines`, briefly for the status."""

from collections.abc import Sequence
from heapq import nlargest
from operator import itemgetter

from proxy.admin.written_values import cut, picked
from proxy.state import Document

MAX_PIPELINE_SUMMARIES = 50  # pipelines in the status document
MAX_NODES = 50  # stages, and also sources, of one pipeline there
REDUCED = "reduced"  # state of a node that is held to a rate


def summaries(documents: Sequence[Document]) -> list[Document]:
    """Return the pipelines briefly: the full first, then those with most that is held.

    At most MAX_PIPELINE_SUMMARIES, with at most MAX_NODES stages and as many sources each.
    """
    return nlargest(MAX_PIPELINE_SUMMARIES, map(_summary, documents), key=pipeline_urgency)


def pipeline_urgency(pipeline: Document) -> tuple[bool, int]:
    """Return what puts a pipeline of the status before others: full, then what is held."""
    nodes = (*pipeline["sources"], *pipeline["stages"])
    return pipeline["pending"]["full"], sum(map(is_held, nodes))


def is_held(node: Document) -> bool:
    """Return whether a node is held to a rate, or waits for room."""
    return bool(node["state"] == REDUCED or node.get("waits"))


def _summary(document: Document) -> Document:
    completion = document["completion"]
    pending = completion["pending"]
    oldest = min(pending["first"], key=itemgetter("started_s"), default=None)
    return {
        "name": document["name"],
        "sources": [_node(node) for node in _shown(document["sources"])],
        "stages": [
            {
                **_node(stage),
                **picked(stage, "upstream", "alive", "received_rate", "processing_rate", "lag"),
                "waits": stage.get("waits"),
            }
            for stage in _shown(document["stages"])
        ],
        "stages_total": len(document["stages"]),
        "pending": {key: value for key, value in pending.items() if key != "first"},
        "completed": completion["completed"],
        "failed": sum(completion["failed"].values()),
        "timed_out": completion["timed_out"],
        "oldest": oldest and picked(oldest, "stage", "batch", "waits_at", "started_s", "age_s"),
    }


def _shown(nodes: Sequence[Document]) -> Sequence[Document]:
    """Return at most MAX_NODES, in their order; held ones are left off last."""
    numbers = nlargest(MAX_NODES, range(len(nodes)), key=lambda number: is_held(nodes[number]))
    return [nodes[number] for number in sorted(numbers)]


def _node(node: Document) -> Document:
    change = node["last_change"]
    return {
        **picked(node, "name", "state", "rate", "normal_rate", "measured_rate", "held_by"),
        "reason": change and cut(change["reason"]),
        "since_s": change and change["at_s"],
    }
