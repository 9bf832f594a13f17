"""Fetches of the lane that read on are recorded as one, and nothing is known otherwise for that."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from parts.bare_lane import BareLane
from parts.fetch_frames import (
    NAMED_VERSION,
    TOPIC,
    TOPIC_ID,
    VERSION,
    batch,
    fetch_answer,
    fetch_frame,
)
from unit.queries.test_following import FollowingWorld

from proxy.relay.clients import ClientUsage
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.intercepted_frames import LaneFrameCopies
from proxy.relay.lane import Lane
from proxy.wire.apis import FETCH, plan_of
from proxy.wire.frames import parse_request_head

pytestmark = pytest.mark.skipif(Lane is None, reason="there was no compiler")

SESSION_ID = 77
OUT_OF_RANGE, NOT_LEADER = 1, 6

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(1, 5)),
        st.tuples(st.sampled_from(["empty", "left out", "cut", "two", "pipelined", "forget"])),
        st.tuples(st.just("not named")),
        st.tuples(st.just("renew")),
        st.tuples(st.just("error"), st.sampled_from([OUT_OF_RANGE, NOT_LEADER])),
        st.tuples(st.just("seek"), st.integers(0, 40)),
        st.tuples(st.just("show")),
    ),
    max_size=25,
)


class Consumer:
    """One connection of a query's client, with the frames of its broker."""

    def __init__(self, *, in_session: bool, version: int = VERSION) -> None:
        world = FollowingWorld(queries=["c"], adaptive=["c"])
        world.following.names.known[TOPIC_ID.bytes] = TOPIC
        self.query, self.client = world.registry.query_of("c"), world.client()
        self.shown = LaneFrameCopies(InterceptQueue(lambda *_: None), self.failed)
        self.lane = BareLane(self.shown)
        self.kind, self.usage = None, ClientUsage(world.following.names, 1)
        self.number = self.offset = self.asked_of = 0
        self.session = (0, 0) if in_session else (0, -1)
        self.session_id = SESSION_ID
        self.version = version

    def failed(self, error: Exception) -> None:
        raise error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lane.close()

    def ask(self, offsets, forgotten=()) -> None:
        self.number += 1
        frame = fetch_frame(offsets, self.session, self.number, forgotten, self.version)
        if self.kind is None:
            head = parse_request_head(memoryview(frame), max_request_bytes=1 << 20)
            self.kind = SimpleNamespace(
                session=SimpleNamespace(interceptor=self.client, usage=self.usage),
                plan=plan_of(FETCH, self.version),
                version=self.version,
                first=head,
                is_wanted=lambda now_ms: self.client.wants(FETCH, now_ms),
                run=[],
            )
            self.lane.learn(self.kind, frame, head.header_end)
        self.lane.ask(frame)

    def answer(self, number, rows) -> None:
        """With rows of partition, error and records; None: no records."""
        session_id = self.session_id if self.session[1] >= 0 else 0
        message = fetch_answer(rows, session_id, self.version)
        message.with_header(correlation_id=number)
        self.lane.answer(bytes(message.encode(header=True, framed=True)))

    def move_on(self) -> None:
        if self.session[1] >= 0:
            self.session = (self.session_id, self.session[1] + 1)

    def step(self, what, how=0) -> None:
        if what == "seek":
            self.offset = how
            return
        if what == "show":
            self.shown.show()
            return
        if what == "renew":
            if self.session[1] > 0:
                self.session, self.session_id = (self.session_id, 0), self.session_id + 1
            return
        start = self.offset
        records = batch(start, how) if what == "read" else batch(start, 2)
        if what == "pipelined":
            self.ask({0: start})
            self.move_on()
            self.ask({0: start + 2})
            self.answer(self.number - 1, [(0, 0, records)])
            self.answer(self.number, [(0, 0, batch(start + 2, 2))])
            self.offset += 4
        elif what == "not named":
            self.ask({} if self.session[1] > 0 else {0: start})
            self.answer(self.number, [(0, OUT_OF_RANGE, None)])
        else:
            self.ask({0: start, 1: 0} if what == "two" else {0: start}, [1] * (what == "forget"))
            rows = {
                "read": [(0, 0, records)],
                "two": [(0, 0, records), (1, 0, None)],
                "forget": [(0, 0, records)],
                "cut": [(0, 0, records[:-1])],
                "empty": [(0, 0, None)],
                "error": [(0, how, None)],
                "left out": [],
            }[what]
            self.answer(self.number, rows)
            self.offset += {"read": how, "two": 2, "forget": 2}.get(what, 0)
        self.move_on()

    def known(self):
        self.shown.show()
        assert not self.shown.unshown.cells[0]
        read = self.usage.fetched
        walked = [*read.sizes.items(), read.total_bytes, read.is_sampled]
        return walked + [
            (
                *(each.key, each.position, list(each.delivered), each.refetched_records),
                *(each.fetched_from, each.open_ended, each.out_of_range_at),
                *(each.log.high_watermark, each.log.log_start_offset, each.log.topic_id),
            )
            for each in self.query.partitions.values()
        ]


EACH_VERSION = pytest.mark.parametrize("version", [NAMED_VERSION, VERSION])


@EACH_VERSION
@given(steps=STEPS, in_session=st.booleans())
@example(steps=[("read", 2), ("read", 3), ("seek", 40), ("read", 1)], in_session=True)
@example(steps=[("read", 2), ("read", 3), ("empty",), ("left out",), ("read", 1)], in_session=True)
@example(steps=[*[("read", 1), ("show",)] * 2, *[("read", 1)] * 3, ("not named",)], in_session=True)
@example(steps=[("read", 1)] * 6 + [("seek", 40)] + [("read", 2)] * 3, in_session=False)
@example(steps=[*[("read", 1)] * 3, ("renew",), *[("read", 1)] * 3], in_session=True)
@example(steps=[*[("read", 1)] * 4, ("error", 1), *[("read", 1)] * 4, ("two",)], in_session=True)
def test_what_is_known_is_the_same_however_many_are_shown_at_a_time(version, steps, in_session):
    of = {"in_session": in_session, "version": version}
    with ExitStack() as both:
        joined, alone = (both.enter_context(Consumer(**of)) for _ in range(2))
        for step in steps:
            joined.step(*step)
            alone.step(*step)
            alone.shown.show()
        assert joined.known() == alone.known()


@EACH_VERSION
def test_those_that_read_on_are_recorded_once(version):
    with Consumer(in_session=True, version=version) as consumer:
        recorded = []
        for count in (1, 1):  # the second is the first within its session
            consumer.step("read", count)
            consumer.shown.show()
        reader = consumer.client.reader
        consumer.client.reader = SimpleNamespace(
            fetch_asked=lambda *told: (
                recorded.append((told[0], *told[2])) or reader.fetch_asked(*told)
            ),
            fetch_answered=reader.fetch_answered,
            asked_last=reader.asked_last,
            fetched_logs=reader.fetched_logs,
        )
        for count in (1, 2, 3):
            consumer.step("read", count)
        consumer.shown.show()
        assert recorded == [(TOPIC, (0, 2))]
        assert consumer.usage.fetched.sizes == {TOPIC: 5 * len(batch(0, 1))}
