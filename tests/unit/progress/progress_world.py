"""What the tests of progress share: a book with short ways to report, read and look."""

import json
from dataclasses import dataclass
from uuid import UUID

import pytest

from proxy.progress.query import ProgressSettings, QuerySettings
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import ReportRefused, parse_report
from proxy.wire.fetch import FetchedPartition

NOON_S = 1_700_000_000.0
LARGE = None
"""As the end of an answer: its records passed unseen."""


def uuid(word) -> str:
    """Return the UUID that stands for a word."""
    return str(UUID(bytes=str(word).encode().ljust(16, b"\0")[:16]))


FOREIGN = uuid("other query")
"""The id of another query than a driver has by itself."""


def configured(*names, **more) -> ProgressSettings:
    queries = tuple(
        QuerySettings(name=name, client_id=name, commit_group=f"{name}-progress") for name in names
    )
    return ProgressSettings(queries=queries, **more)


@dataclass
class Driver:
    """A driver with its listener: one query, one run at a time."""

    world: "World"
    name: str | None = "orders"
    client_id: str | None = None
    query_id: str = uuid("query")
    run_id: str = uuid("run-1")
    sender: str = uuid("sender")
    number: int = 0
    batch_id: int = -1

    def send(self, event, batch=None, error=None, number=None, age_ms=0.0, **more):
        if event != "running":
            self.number = self.number + 1 if number is None else number
        document = {
            "sender": self.sender,
            "number": self.number if event != "running" else None,
            "event": event,
            "query_id": self.query_id,
            "run_id": self.run_id,
            "name": self.name,
            "client_id": self.client_id,
            "age_ms": age_ms,
            "batch": batch,
            "error": error,
            **more,
        }
        report = parse_report(json.dumps(document).encode())
        return self.world.registry.reports.accept(report, self.world.now_ms, self.world.now_s)

    def batch(self, start, end, batch_id=None, topic="t", **more):
        """Report a batch; offsets are a number for partition 0, or a mapping."""
        self.batch_id = self.batch_id + 1 if batch_id is None else batch_id
        return self.send("progress", batch_of(self.batch_id, start, end, topic), **more)

    def refused(self, start, end, **more) -> str:
        """Report a batch that is refused; return why."""
        with pytest.raises(ReportRefused) as caught:
            self.batch(start, end, **more)
        return str(caught.value.reason)

    def lose(self, count=1):
        self.number += count

    def restart(self, run_id, sender=None):
        self.run_id = uuid(run_id)
        if sender is not None:
            self.sender, self.number = uuid(sender), 0
        return self.send("started")


def batch_of(batch_id, start, end, topic="t"):
    return {
        "batch_id": batch_id,
        "timestamp": "2026-01-02T03:04:05.678Z",
        "rows": 0,
        "durations_ms": {"triggerExecution": 1},
        "sources": [
            {
                "description": "k",
                "start": offsets_of(start, topic),
                "end": offsets_of(end, topic) or {},
                "latest": None,
                "rows": 0,
            }
        ],
    }


def offsets_of(value, topic):
    if value is None:
        return None
    partitions = value if isinstance(value, dict) else {0: value}
    return {topic: {str(partition): offset for partition, offset in partitions.items()}}


class World:
    """A book on virtual time."""

    def __init__(self, settings=None, known=("orders",)):
        self.now_ms = 1_000_000.0
        self.events = []
        self.known = set(known)
        self.settings = settings or configured("orders")
        self.reopen()

    def reopen(self):
        """Let another process take the place of the proxy, without its state."""
        self.registry = QueryRegistry(self.settings, self.known.__contains__, self.events.append)

    @property
    def now_s(self):
        return NOON_S + self.now_ms / 1000

    def driver(self, **more) -> Driver:
        return Driver(self, **more)

    def wait(self, ms):
        self.now_ms += ms
        self.registry.sweep(self.now_ms)

    def query(self, client_id="orders"):
        return self.registry.query_of(client_id)

    def part(self, topic="t", partition=0, client_id="orders"):
        return self.query(client_id).partitions[topic, partition]

    def kinds(self):
        return [str(note.kind) for note in self.events]

    def skipped(self, topic="t", partition=0):
        part = self.part(topic, partition)
        return [(skip.start, skip.end, str(skip.reason)) for skip in part.skipped.ranges]

    def documents(self):
        return self.registry.documents(self.now_ms, self.now_s)

    def document(self, name="orders"):
        (found,) = (each for each in self.documents() if each["name"] == name)
        return found


class Client:
    """One connection of a query's client."""

    def __init__(self, world, query=None, node_id=1, topic_id=None):
        self.world = world
        self.follower = (query or world.query()).reader(node_id)
        self.topic_id = topic_id

    def ask(self, offset, partition=0):
        self.asked = offset
        self.follower.fetch_asked("t", partition, self.topic_id, offset, self.world.now_ms)

    def answer(self, *, count=1, end=LARGE, hw=1000, start=0, error=0, asked=..., partition=0):
        """Answer with so many bytes of records."""
        fetched = FetchedPartition("t", partition, error, hw, hw, start, count, end)
        asked = self.asked if asked is ... else asked
        self.follower.fetch_answered(
            "t", partition, self.topic_id, asked, fetched, self.world.now_ms
        )

    def read(self, offset, **more):
        self.ask(offset)
        self.answer(**more)
