"""What the tests of progress share: a world with short ways to report, read and look."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from parts.query_world import configured
from parts.reports import ReportingDriver, batch_document, parsed, uuid
from parts.virtual_time import VirtualTime

from proxy.admin.document_models import RowContext
from proxy.admin.query_documents import progress_documents
from proxy.progress.query_registry import QueryRegistry
from proxy.progress.report import ReportRefused
from proxy.progress.tracker import QueryReader
from proxy.wire.layout import run_generator

LARGE = None
"""As the end of an answer: its records passed unseen."""

FOREIGN = uuid("other query")
"""The id of another query than a driver has by itself."""


@dataclass
class Driver(ReportingDriver):
    """A driver with its listener: one query, one run at a time."""

    world: Any = field(kw_only=True)
    batch_id: int = -1

    def send(self, event, number=None, **more):
        if number is not None:
            self.number = number - 1
        report = parsed(self.document(event, **more))
        registry = self.world.registry
        return run_generator(registry.accepting(report, self.world.now_ms, self.world.now_s))

    def batch(self, start, end, batch_id=None, topic="t", **more):
        """Report a batch; offsets are a number for partition 0, or a mapping."""
        self.batch_id = self.batch_id + 1 if batch_id is None else batch_id
        return self.send("progress", batch=batch_document(self.batch_id, start, end, topic), **more)

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


class ProgressWorld(VirtualTime):
    """A registry of queries on virtual time."""

    def __init__(self, settings=None, known=("orders",)):
        self.events = []
        self.known = set(known)
        self.settings = settings or configured("orders")
        self.reopen()

    def reopen(self):
        """Let another process take the place of the proxy, without its state."""
        knows = self.known.__contains__
        self.registry = QueryRegistry(self.settings, self.events.append, knows)

    def driver(self, **more) -> Driver:
        return Driver(world=self, **more)

    def wait(self, ms):
        self.pass_ms(ms)
        list(self.registry.sweeping(self.now_ms))

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
        found = progress_documents(self.registry.queries, RowContext(self.now_s, self.now_ms))
        return [each for each in found if each]

    def document(self, name="orders"):
        (found,) = (each for each in self.documents() if each["name"] == name)
        return found


class Client:
    """One connection of a query's client."""

    def __init__(self, world, query=None, node_id=1, topic_id=None):
        self.world = world
        self.follower = QueryReader(query or world.query(), node_id)
        self.topic_id = topic_id

    def ask(self, offset, partition=0):
        self.asked = offset
        self.follower.fetch_asked("t", self.topic_id, [(partition, offset)], self.world.now_ms)

    def answer(self, *, count=1, end=LARGE, hw=1000, start=0, error=0, asked=..., partition=0):
        """Answer with so many bytes of records."""
        fetched = (partition, error, hw, hw, start, count, end)
        asked = self.asked if asked is ... else asked
        known = {} if asked is None else {partition: asked}
        self.follower.fetch_answered("t", self.topic_id, known, [fetched], self.world.now_ms)

    def read(self, offset, **more):
        self.ask(offset)
        self.answer(**more)
