"""Completed offsets go to consumer groups of the real broker, whatever happens to it or to them."""

import asyncio
import struct
import time
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic
from structlog.testing import capture_logs
from support.detour import detour
from support.groups import Position, describe, offsets_of, set_offsets
from support.proxy_process import HOST
from support.strangers import stranger
from support.waiting import at_work, eventually

from examples.devkit.broker import EmbeddedBroker
from proxy.cluster.kafka_client import ANSWER_TIMEOUT_S, Bootstrap, KafkaClient
from proxy.progress import committer as module
from proxy.progress.committer import Committer

IMPATIENT_S = 0.3
"""How long to wait for an answer that will not come."""

FLUSH_S = 20.0

Partition = tuple[str, int]


class Book:
    """What queries completed. A group that is ahead is only moved back when it is in `reset`."""

    def __init__(self) -> None:
        self.completed: dict[str, dict[Partition, int]] = {}
        self.reset: set[str] = set()
        self.in_group: dict[str, dict[Partition, int]] = {}
        self.told: dict[str, list[dict[Partition, int]]] = {}
        self.taken: list[tuple[str, dict[Partition, int]]] = []
        self.problem: dict[str, str | None] = {}
        self.asked = 0
        self.dropped: list[str] = []
        self.began_ms = time.monotonic() * 1000

    def due_commits(self) -> dict[str, dict[Partition, int]]:
        self.asked += 1
        return {group: due for group in self.completed if (due := self.due_to(group))}

    def due_to(self, group: str) -> dict[Partition, int]:
        self.asked += 1
        return {
            partition: offset
            for partition, offset in self.completed[group].items()
            if (at := self.in_group.get(group, {}).get(partition, -1)) < offset
            or (offset < at and group in self.reset)
        }

    def group_has(self, group: str, offsets: Mapping[Partition, int | None]) -> None:
        has = {key: offset for key, offset in offsets.items() if offset is not None}
        self.told.setdefault(group, []).append(has)
        self.in_group.setdefault(group, {}).update(has)
        for key in offsets.keys() - has.keys():
            self.in_group[group].pop(key, None)

    def committed(self, group: str, offsets: Mapping[Partition, int], now_ms: float) -> None:
        assert self.began_ms <= now_ms <= time.monotonic() * 1000
        # More may have been completed while the commit was on its way.
        completed = self.completed[group]
        assert all(offset <= completed[part] for part, offset in offsets.items()) or (
            group in self.reset
        )
        if group not in self.reset:
            before = self.in_group.get(group, {})
            assert all(before.get(part, -1) <= offset for part, offset in offsets.items())
        self.taken.append((group, dict(offsets)))
        self.in_group.setdefault(group, {}).update(offsets)
        self.problem[group] = None

    def commit_failed(self, group: str, message: str) -> None:
        self.problem[group] = message

    def drop_commits(self, groups: Collection[str]) -> None:
        self.dropped += groups
        self.completed = {
            group: {} if group in groups else completed
            for group, completed in self.completed.items()
        }

    @property
    def groups_due(self) -> set[str]:
        return set(self.due_commits())


@pytest.fixture
def book() -> Book:
    return Book()


class Access:
    """A way to a cluster, and the clients that were made of it."""

    def __init__(
        self, bootstrap: str | tuple[str, int], answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        if isinstance(bootstrap, str):
            host, port = bootstrap.split(":")
            bootstrap = host, int(port)
        self.bootstrap = Bootstrap([bootstrap])
        self.answer_timeout_s = answer_timeout_s
        self.clients: list[KafkaClient] = []

    def client(self) -> KafkaClient:
        self.clients.append(KafkaClient(self.bootstrap, self.answer_timeout_s))
        return self.clients[-1]

    @property
    def connections(self) -> int:
        return sum(client.connections for client in self.clients)


def committing(book: Book, way: Access) -> Committer:
    return Committer(book, way.client)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits and tries again after moments."""
    monkeypatch.setattr(module, "COMMIT_INTERVAL_S", 0.01)
    monkeypatch.setattr(module, "MIN_BACKOFF_S", 0.05)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.2)


async def test_kafka_s_own_tool_shows_the_right_lag(
    kafka: EmbeddedBroker, topic: Callable[..., str], fill: Callable[..., None], book: Book
) -> None:
    name = topic(2)
    fill(name, 100, 20, partitions=2)
    book.completed["lag"] = {(name, 0): 20, (name, 1): 50}
    way = Access(kafka.bootstrap)
    async with at_work(committing(book, way).run()):
        await eventually(lambda: not book.groups_due, "committed")
        assert book.taken == [("lag", book.completed["lag"])], "one commit for both"
        shown = await asyncio.to_thread(describe, kafka.bootstrap, "lag")
        assert shown == {(name, 0): Position(20, 50, 30), (name, 1): Position(50, 50, 0)}
        book.completed["lag"][name, 0] = 45
        await eventually(lambda: not book.groups_due, "committed")
        assert book.taken[-1] == ("lag", {(name, 0): 45}), "only what is new"
        assert way.connections == 1
    assert way.connections == 0
    assert offsets_of(kafka.bootstrap, "lag") == book.completed["lag"]
    assert book.told == {"lag": [{}]}, "read once, before the first commit"


async def test_a_group_that_is_let_go(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, quick: None
) -> None:
    """What is due to it goes out, and what another member commits to it later is not undone."""
    name, gone, other = topic(), "gone", "stays"
    book.completed = {gone: {(name, 0): 5}, other: {(name, 0): 6}}
    committer = committing(book, Access(kafka.bootstrap))
    async with at_work(committer.run()):
        await eventually(lambda: not book.groups_due, "committed")
        book.completed[gone][name, 0] = 7
        assert await committer.revoke([gone], FLUSH_S)
        assert offsets_of(kafka.bootstrap, gone) == {(name, 0): 7}
        assert book.dropped == [gone]
        told = len(book.told[gone])
        await asyncio.to_thread(set_offsets, kafka.bootstrap, gone, {(name, 0): 20})
        book.in_group.pop(gone)
        book.completed[gone] = {(name, 0): 8}  # it has come back, from a record that is older
        await eventually(lambda: len(book.told[gone]) > told, "read again")
        await eventually(lambda: not book.groups_due, "nothing is due")
    assert offsets_of(kafka.bootstrap, gone) == {(name, 0): 20}


async def test_a_group_that_cannot_be_reached_is_let_go_all_the_same(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, quick: None
) -> None:
    book.completed = {"unheard": {(topic(), 0): 5}}
    async with detour(kafka.bootstrap, swallow=b"unheard") as way:
        committer = committing(book, Access(way.address))
        async with at_work(committer.run()):
            await eventually(lambda: way.swallowed, "a commit is under way")
            (task,) = (each for each in asyncio.all_tasks() if each.get_coro().__name__ == "commit")
            assert not await committer.revoke(["unheard"], IMPATIENT_S)
            assert task.cancelled()
            way.swallow = None
            await asyncio.sleep(IMPATIENT_S)
    assert offsets_of(kafka.bootstrap, "unheard") == {}


async def test_without_anything_due_nothing_is_opened(
    kafka: EmbeddedBroker, book: Book, quick: None
) -> None:
    book.completed["idle"] = {}
    async with detour(kafka.bootstrap) as way:
        async with at_work(committing(book, Access(way.address)).run()):
            await eventually(lambda: book.asked > 20, "looked for what is due")
        assert await committing(book, Access(way.address)).flush(FLUSH_S)
        assert way.opened == 0


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_a_group_with_a_live_member(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, quick: None, protocol: str
) -> None:
    """It is reported once and holds up no other group; when the member leaves, commits go on."""
    name, live, other = topic(), f"live-{protocol}", f"other-{protocol}"
    consumer = Consumer(
        {"bootstrap.servers": kafka.bootstrap, "group.id": live, "group.protocol": protocol}
    )
    assigned: list[object] = []
    consumer.subscribe([name], on_assign=lambda _consumer, parts: assigned.append(parts))
    await asyncio.to_thread(_poll_until, consumer, assigned)
    book.completed = {live: {(name, 0): 7}, other: {(name, 0): 8}}
    with capture_logs() as logs:
        async with at_work(committing(book, Access(kafka.bootstrap)).run()):
            await eventually(lambda: book.problem.get(live), "refused")
            assert "live members" in (book.problem[live] or "")
            await eventually(lambda: book.groups_due == {live}, "the other is committed")
            await eventually(lambda: logs, "logged at the second try")
            await asyncio.to_thread(consumer.close)
            await eventually(lambda: not book.groups_due, "committed after the member left")
    assert offsets_of(kafka.bootstrap, live) == {(name, 0): 7}
    said = [(line["event"], line["group"]) for line in logs]
    assert said == [
        ("offsets not committed, they stay due", live),
        ("offsets committed again", live),
    ]


def _poll_until(consumer: Consumer, assigned: list[object]) -> None:
    deadline = time.monotonic() + 30
    while not assigned and time.monotonic() < deadline:
        consumer.poll(0.1)
    assert assigned


async def test_what_kafka_has_forgotten_is_committed_again(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.3)
    name = topic(2)
    book.completed["forgotten"] = {(name, 0): 1, (name, 1): 2}
    async with at_work(committing(book, Access(kafka.bootstrap)).run()):
        await eventually(lambda: not book.groups_due, "committed")
        with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
            deleted = admin.delete_consumer_groups(["forgotten"])["forgotten"]
            await asyncio.to_thread(deleted.result, 30)
        await eventually(lambda: len(book.taken) > 1, "committed again")
    assert offsets_of(kafka.bootstrap, "forgotten") == book.completed["forgotten"]


async def test_a_topic_is_deleted_and_made_anew(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, quick: None
) -> None:
    """Its partitions are reported, the others go on, it is not made by our asking; then it is back
    under its name and its offsets are committed.
    """
    gone, stays = topic(2), topic()
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
        await _delete(admin, gone)
        book.completed["some"] = {(gone, 0): 1, (gone, 1): 2, (stays, 0): 3}
        committer = committing(book, Access(kafka.bootstrap))
        with capture_logs() as logs:
            async with at_work(committer.run()):
                await eventually(lambda: book.problem.get("some"), "refused")
                assert (
                    book.problem["some"]
                    == f"{gone}-0, {gone}-1: there is no such topic or partition"
                )
                assert book.taken == [("some", {(stays, 0): 3})]
                book.completed["some"][stays, 0] = 4
                await eventually(lambda: len(book.taken) > 1, "the other one goes on")
                assert book.problem["some"], "still shown"
                assert gone not in admin.list_topics(timeout=10).topics
                admin.create_topics([NewTopic(gone, 2, 1)])[gone].result(30)
                await eventually(lambda: not book.groups_due, "committed to the new topic")
    assert offsets_of(kafka.bootstrap, "some") == book.completed["some"]
    assert [line["event"][:22] for line in logs] == [
        "offsets not committed,",
        "offsets committed agai",
    ]


async def _delete(admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result(30)
    await eventually(lambda: topic not in admin.list_topics(timeout=10).topics, "deleted")


async def test_a_group_that_is_ahead_goes_back_after_a_reset_only(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, quick: None
) -> None:
    name = topic(2)
    set_offsets(kafka.bootstrap, "ahead", {(name, 0): 40})
    book.completed["ahead"] = {(name, 0): 20, (name, 1): 5}
    async with at_work(committing(book, Access(kafka.bootstrap)).run()):
        await eventually(lambda: not book.groups_due, "committed")
        assert book.told["ahead"] == [{(name, 0): 40}]
        assert book.taken == [("ahead", {(name, 1): 5})]
        assert offsets_of(kafka.bootstrap, "ahead") == {(name, 0): 40, (name, 1): 5}
        book.reset.add("ahead")
        await eventually(lambda: not book.groups_due, "moved back")
    assert offsets_of(kafka.bootstrap, "ahead") == {(name, 0): 20, (name, 1): 5}


@pytest.mark.slow
async def test_the_broker_is_killed_while_commits_are_due(
    tmp_path: Path, book: Book, quick: None
) -> None:
    """Nothing is lost, and each problem is logged once."""
    part = ("records", 0)
    with EmbeddedBroker(tmp_path) as broker, capture_logs() as logs:
        with AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0}) as admin:
            admin.create_topics([NewTopic("records", 1, 1)])["records"].result(30)
        committer = committing(book, Access(broker.bootstrap))
        async with at_work(committer.run()):
            book.completed["group"] = {part: 1}
            await eventually(lambda: not book.groups_due, "committed")
            broker.kill()
            book.completed["group"] = {part: 2}
            await eventually(lambda: book.problem.get("group"), "failed")
            assert not await committer.flush(IMPATIENT_S)
            await asyncio.to_thread(broker.start)
            book.completed["group"] = {part: 3}
            await eventually(lambda: not book.groups_due, "committed", timeout_s=60)
        assert offsets_of(broker.bootstrap, "group") == {part: 3}
    assert book.problem == {"group": None}
    said = [line["error"] for line in logs if line["log_level"] == "warning"]
    assert said
    assert all(one != next_one for one, next_one in pairwise(said)), "once, until it is another"
    assert logs[-1]["event"] == "offsets committed again"


async def test_flush_commits_at_once_and_closes(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book
) -> None:
    name = topic()
    book.completed = {"one": {(name, 0): 1}, "two": {(name, 0): 2}}
    way = Access(kafka.bootstrap)
    assert await committing(book, way).flush(FLUSH_S)
    assert len(way.clients) == 2
    assert way.connections == 0
    for group, number in (("one", 1), ("two", 2)):
        assert offsets_of(kafka.bootstrap, group) == {(name, 0): number}


async def test_flush_beside_run_tries_at_once_what_waits(
    kafka: EmbeddedBroker,
    topic: Callable[..., str],
    book: Book,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MIN_BACKOFF_S", 1000.0)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 1000.0)
    name = topic()
    book.completed["waits"] = {(name, 0): 1}
    async with detour(kafka.bootstrap, swallow=b"waits") as way:
        committer = committing(book, Access(way.address, answer_timeout_s=IMPATIENT_S))
        async with at_work(committer.run()):
            await eventually(lambda: book.problem.get("waits"), "failed")
            way.swallow = None
            assert await committer.flush(FLUSH_S)
    assert offsets_of(kafka.bootstrap, "waits") == {(name, 0): 1}


async def test_flush_keeps_to_its_time(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book
) -> None:
    book.completed = {"stuck": {(topic(), 0): 1}}
    async with detour(kafka.bootstrap, swallow=b"stuck") as way:
        assert not await committing(book, Access(way.address)).flush(IMPATIENT_S)
        await eventually(lambda: way.opened == 1 and way.open == 0, "closed")
    assert book.groups_due == {"stuck"}


async def test_a_group_that_gets_no_answer_holds_up_no_other(
    kafka: EmbeddedBroker, topic: Callable[..., str], book: Book, quick: None
) -> None:
    name = topic()
    book.completed = {"stuck": {(name, 0): 1}, "free": {(name, 0): 2}}
    async with detour(kafka.bootstrap, swallow=b"stuck") as way:
        async with at_work(committing(book, Access(way.address)).run()):
            await eventually(lambda: way.swallowed, "one is stuck")
            for offset in (3, 4, 5):
                book.completed["free"][name, 0] = offset
                await eventually(lambda: book.groups_due == {"stuck"}, "the other is committed")
            assert way.swallowed == 1, "the first try still waits"
        await eventually(lambda: way.open == 0, "cancelled and closed")
    assert book.problem == {"free": None}
    assert offsets_of(kafka.bootstrap, "free") == {(name, 0): 5}


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (struct.pack(">ii", 9, 1) + b"?" * 5, ""),
        (struct.pack(">ii", 4, 99), "do not match"),
        (struct.pack(">i", -1), ""),
        (b"", "closed the connection"),
        (None, "no answer in 0.3 s"),
    ],
    ids=["garbage", "other correlation id", "negative", "closed", "silent"],
)
async def test_something_else_answers(book: Book, frame: bytes | None, words: str) -> None:
    book.completed["group"] = {("t", 0): 1}
    async with stranger(frame) as address:
        committer = committing(book, Access(address, answer_timeout_s=IMPATIENT_S))
        async with at_work(committer.run()):
            message = await eventually(lambda: book.problem.get("group"), "failed")
    assert message.startswith(f"{HOST}:{address[1]}: ")
    assert len(message) > len(f"{HOST}:{address[1]}: ")
    assert words in message
    assert book.groups_due == {"group"}


async def test_a_cluster_that_wants_a_login(kafka: EmbeddedBroker, book: Book) -> None:
    book.completed["group"] = {("t", 0): 1}
    async with at_work(committing(book, Access(kafka.sasl_bootstrap)).run()):
        message = await eventually(lambda: book.problem.get("group"), "failed")
    assert "login" in message
