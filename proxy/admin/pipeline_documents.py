"""Describes pipelines: in full for `/v1/pipelines`, briefly for the status."""

from collections.abc import Callable, Sequence
from heapq import nlargest

from proxy.admin.cached import Cached
from proxy.admin.query_documents import Document, Reports, cut

MAX_SUMMARIES = 50
"""Pipelines in the status document."""

MAX_NODES = 50
"""Stages, and also sources, of one pipeline in the status document."""

REDUCED = "reduced"
"""State of a node that is held to a rate."""


class PipelineDocuments:
    """All pipelines as documents, made again as rarely as their size demands."""

    def __init__(self, reports: Reports, clock_ms: Callable[[], float]) -> None:
        self._documents = Cached(reports.pipelines, clock_ms)

    def documents(self) -> Sequence[Document]:
        """Return all that there is to show of each pipeline."""
        return self._documents.get()

    def summaries(self) -> list[Document]:
        """Return the pipelines briefly: the full first, then those with most that is held.

        At most MAX_SUMMARIES, with at most MAX_NODES stages and as many sources each.
        """
        documents = nlargest(MAX_SUMMARIES, self.documents(), key=_urgency)
        return [_summary(document) for document in documents]


def _urgency(document: Document) -> tuple[bool, int]:
    nodes = (*document["sources"], *document["stages"])
    return document["completion"]["pending"]["full"], sum(map(is_held, nodes))


def is_held(node: Document) -> bool:
    """Return whether a node is held to a rate, or waits for room."""
    return bool(node["state"] == REDUCED or node.get("waits"))


def _summary(document: Document) -> Document:
    completion = document["completion"]
    pending = completion["pending"]
    return {
        "name": document["name"],
        "sources": [_node(node) for node in _chosen(document["sources"])],
        "stages": [
            {
                **_node(stage),
                "upstream": stage["upstream"],
                "alive": stage["alive"],
                "received_rate": stage["received_rate"],
                "processing_rate": stage["processing_rate"],
                "lag": stage["lag"],
                "waits": stage.get("waits"),
            }
            for stage in _chosen(document["stages"])
        ],
        "stages_total": len(document["stages"]),
        "pending": {key: value for key, value in pending.items() if key != "first"},
        "completed": completion["completed"],
        "failed": sum(completion["failed"].values()),
        "timed_out": completion["timed_out"],
        "oldest": _oldest(pending["first"]),
    }


def _chosen(nodes: Sequence[Document]) -> Sequence[Document]:
    """Return at most MAX_NODES, in their order; held ones are left off last."""
    if len(nodes) <= MAX_NODES:
        return nodes
    numbers = nlargest(MAX_NODES, range(len(nodes)), key=lambda number: is_held(nodes[number]))
    return [nodes[number] for number in sorted(numbers)]


def _node(node: Document) -> Document:
    change = node["last_change"]
    return {
        "name": node["name"],
        "state": node["state"],
        "rate": node["rate"],
        "normal_rate": node["normal_rate"],
        "measured_rate": node["measured_rate"],
        "held_by": node["held_by"],
        "reason": change and cut(change["reason"]),
        "since_s": change and change["at_s"],
    }


def _oldest(first: Sequence[Document]) -> Document | None:
    """Return the pending source batch that began first, of those that are shown."""
    oldest = min(first, key=lambda root: root["started_s"], default=None)
    return oldest and {
        key: oldest[key] for key in ("stage", "batch", "waits_at", "started_s", "age_s")
    }
