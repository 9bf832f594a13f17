"""Fetches of many partitions that read on are recorded as one, and nothing is lost by that."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from parts.fetch_frames import LOG_END, TOPIC, TOPIC_ID, VERSION, batch, fetch_answer, fetch_frame
from unit.queries.test_following import FollowingWorld

from proxy.queries.coalesced_fetches import ROW_BYTES
from proxy.relay.intercept_queue import MOST_UNSHOWN_BYTES
from proxy.wire.apis import FETCH
from proxy.wire.fetch_response import MAX_UNSHOWN, FetchWalker
from proxy.wire.frames import parse_request_head

SESSION_ID = 77
OUT_OF_RANGE, NOT_LEADER = 1, 6
PARTITIONS = 3

COUNTS = st.lists(st.sampled_from([0, 1, 1, 1, 2]), min_size=PARTITIONS, max_size=PARTITIONS)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), COUNTS, st.sampled_from([1 << 16, 1 << 16, 150, 90])),
        st.tuples(st.just("pipelined"), COUNTS, COUNTS),
        st.tuples(st.just("seek"), st.integers(0, PARTITIONS - 1), st.integers(0, LOG_END)),
        st.tuples(st.just("fail"), st.integers(0, PARTITIONS - 1)),
        st.tuples(st.just("leave"), st.integers(0, PARTITIONS - 1)),
        st.tuples(st.just("error"), st.sampled_from([OUT_OF_RANGE, NOT_LEADER])),
        st.tuples(st.just("record")),
    ),
    max_size=25,
)
ALL_READ = "read", [1, 1, 1], 90


class Consumer:
    """One connection of a query's client; in a session it names what has changed."""

    def __init__(self, *, in_session: bool, partitions=PARTITIONS) -> None:
        world = FollowingWorld(queries=["c"])
        world.following.names.known[TOPIC_ID.bytes] = TOPIC
        self.unshown = world.unshown
        self.query, self.client = world.registry.query_of("c"), world.client()
        assert self.client.wants(FETCH, 0.0)
        self.offsets = dict.fromkeys(range(partitions), 0)
        self.named: dict[int, int] = {}
        """In the session."""
        self.in_session = in_session
        self.epoch = 0 if in_session else -1

    def ask(self, offsets):
        session = SESSION_ID if self.epoch > 0 else 0, self.epoch
        frame = memoryview(fetch_frame(offsets, session))
        seen = self.client.request(parse_request_head(frame, max_request_bytes=1 << 20), frame, 0.0)
        seen.sent()
        self.epoch += self.in_session
        return seen

    def answer(self, seen, rows, piece_bytes=1 << 20) -> None:
        """With rows of partition, error and records; None: no records."""
        body = bytes(fetch_answer(rows, SESSION_ID).encode(header=False))
        walker = FetchWalker(VERSION, len(body), seen.observer(0.0))
        for start in range(0, len(body), piece_bytes):
            walker.feed(memoryview(body)[start : start + piece_bytes])
        walker.show()

    def names(self):
        """Return what a request names: all, or in a session what has changed."""
        changed = {
            index: offset
            for index, offset in self.offsets.items()
            if not self.in_session or self.named.get(index) != offset
        }
        self.named.update(changed)
        return changed

    def read(self, counts, piece_bytes=1 << 20):
        seen = self.ask(self.names())
        rows = [
            (index, 0, batch(offset, count) if count else None)
            for (index, offset), count in zip(self.offsets.items(), counts, strict=False)
            if count or not self.in_session
        ]
        self.answer(seen, rows, piece_bytes)
        self.move_on(counts)

    def move_on(self, counts):
        for index, count in zip(list(self.offsets), counts, strict=False):
            self.offsets[index] += count

    def step(self, what, *how) -> None:
        match what, how:
            case "read", (counts, piece_bytes):
                self.read(counts, piece_bytes)
            case "pipelined", both:
                asked = []
                for counts in both:
                    asked.append((self.ask(self.names()), dict(self.offsets), counts))
                    self.move_on(counts)
                for seen, offsets, counts in asked:
                    rows = zip(offsets.items(), counts, strict=False)
                    self.answer(seen, [(at[0], 0, batch(at[1], n)) for at, n in rows if n])
            case "seek", (index, offset):
                self.offsets |= {index: offset}
            case "fail", (index,):  # asked, and answered with less than a batch
                cut = batch(self.offsets.get(index, 0), 1)[:-1]
                self.answer(self.ask(self.names()), [(index, 0, cut)])
            case "leave", (index,):
                if self.offsets.pop(index, None) is None:
                    self.offsets[index] = 0
                    self.named.pop(index, None)
            case "error", (code,):
                rows = [(index, code, None) for index in self.offsets]
                self.answer(self.ask(self.names()), rows)
            case "record", ():
                self.client.run.record()

    def known(self):
        self.client.run.record()
        assert not self.unshown.cells[0]
        return [
            (
                *(each.key, each.position, list(each.delivered), each.refetched_records),
                *(each.fetched_from, each.out_of_range_at),
                *(each.log.high_watermark, each.log.log_start_offset, each.log.topic_id),
            )
            for each in self.query.partitions.values()
        ]


@given(steps=STEPS, in_session=st.booleans())
@example(
    steps=[("read", [1, 1, 1], 90)] * 4 + [("seek", 1, 40), ("read", [1, 1, 1], 90)],
    in_session=True,
)
@example(steps=[*[("read", [1, 1, 1], 1 << 16)] * 3, ("fail", 1)] * 2, in_session=False)
def test_what_is_known_is_the_same_however_many_are_recorded_at_a_time(steps, in_session):
    joined, alone = (Consumer(in_session=in_session) for _ in range(2))
    for step in steps:
        joined.step(*step)
        alone.step(*step)
        alone.client.run.record()
    assert joined.known() == alone.known()


@pytest.mark.parametrize("piece_bytes", [1 << 16, 90])
@pytest.mark.parametrize("in_session", [False, True])
def test_those_that_read_on_are_recorded_once(monkeypatch, in_session, piece_bytes):
    consumer = Consumer(in_session=in_session)
    reader = consumer.client.reader
    recorded = []
    answered = type(reader).fetch_answered
    monkeypatch.setattr(
        type(reader),
        "fetch_answered",
        lambda *told: recorded.append(len(told[4])) or answered(*told),
    )
    for _ in range(20):
        consumer.read([1] * PARTITIONS, piece_bytes)
    assert recorded == []
    assert consumer.known()[0][1] in (19, 20)  # the end of what came in pieces is not known
    assert sum(recorded) == 2 * PARTITIONS


def test_few_wait_at_a_time():
    consumer = Consumer(in_session=False, partitions=MAX_UNSHOWN + 1)
    consumer.read([1] * (MAX_UNSHOWN + 1))
    assert consumer.unshown.cells[0] == 0
    assert len(consumer.query.partitions) == MAX_UNSHOWN + 1
    consumer.offsets.popitem()
    consumer.read([1] * MAX_UNSHOWN)
    assert consumer.unshown.cells[0] == MAX_UNSHOWN * ROW_BYTES < MOST_UNSHOWN_BYTES
    consumer.client.close()
    assert consumer.unshown.cells[0] == 0
    assert {each.position for each in consumer.query.partitions.values()} == {1, 2}
