"""What a connection's Fetches say of topics by name and by id, with a fetch session and without."""

import gc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from progress_world import ProgressWorld

from proxy.progress.topics import TopicNames
from proxy.progress.tracker import FetchExchange, QueryReader
from proxy.wire.fetch import FetchRequestContent

NO_ERROR, OUT_OF_RANGE = 0, 1
SESSION_NOT_FOUND = 70
SESSION_ID = 9
RECORD_BYTES = 50
ORDERS_ID = b"o" * 16
CLICKS_ID = b"c" * 16


class Follower:
    """Keeps what it is told."""

    def __init__(self):
        self.seen = []

    def fetch_asked(self, topic, topic_id, positions, now_ms):
        for partition, offset in positions:
            self.seen.append(("asked", topic, partition, topic_id, offset, now_ms))

    def fetch_answered(self, topic, topic_id, asked, answers, now_ms):
        for partition, *rest in answers:
            assert tuple(rest) == ANSWER
            offset = asked.get(partition)
            self.seen.append(("answered", topic, partition, topic_id, offset, now_ms))


def ask(session_id, epoch, positions, forgotten=()):
    return FetchRequestContent(
        session_id,
        epoch,
        tuple((*key, offset) for key, offset in positions.items()),
        tuple(forgotten),
    )


ANSWER = (NO_ERROR, 100, 100, 0, 10, None)


def tell(observer, key):
    topic, partition = key
    observer.partitions(topic, [(partition, *ANSWER)])


class Line:
    """A connection with short ways to use it; the time goes up with each step."""

    def __init__(self, names=None):
        self.follower = Follower()
        self.names = names or TopicNames()
        self.now_ms = 0.0

    def ask(self, request):
        self.now_ms += 1
        exchange = FetchExchange(self.follower, self.names, request)
        exchange.asked(self.now_ms)
        return exchange

    def observer(self, exchange, now_ms):
        exchange.answered_ms = now_ms
        return exchange

    def answer(self, exchange, session, *keys):
        """Answer; `session` is (error code, session id), None before version 7."""
        self.now_ms += 1
        observer = self.observer(exchange, self.now_ms)
        if session is not None:
            observer.session(*session)
        return [self.told(observer, key) for key in keys]

    def told(self, observer, key):
        """Answer for a partition and return the offset that it is said to be asked from."""
        before = len(self.follower.seen)
        tell(observer, key)
        (seen,) = self.follower.seen[before:]
        assert seen[:3] == ("answered", *key)
        return seen[4]


P0, P1, P2 = (("orders", n) for n in range(3))


def test_all_positions_of_a_request_are_told():
    line = Line()
    line.ask(ask(0, -1, {P0: 5, ("clicks", 7): 6}))
    assert line.follower.seen == [
        ("asked", "orders", 0, None, 5, 1.0),
        ("asked", "clicks", 7, None, 6, 1.0),
    ]


def test_an_answer_is_told_with_the_positions_of_its_own_request():
    line = Line()
    first = line.ask(ask(0, -1, {P0: 5, P1: 6}))
    assert line.answer(first, None, P0, P1) == [5, 6]
    second = line.ask(ask(0, -1, {P0: 8}))
    assert line.answer(second, None, P0, P1) == [8, None]


def test_pipelined_requests_are_answered_as_of_their_own_time():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {P0: 7}))
    third = line.ask(ask(9, 2, {P0: 8, P2: 1}, [P1]))
    fourth = line.ask(ask(9, 3, {P0: 9, P1: 60}))
    assert line.answer(second, (NO_ERROR, 9), P0) == [7]
    assert line.answer(third, (NO_ERROR, 9), P0, P2) == [8, 1]
    assert line.answer(fourth, (NO_ERROR, 9), P0, P1) == [9, 60]


def test_of_a_partition_named_twice_the_last_offset_counts():
    line = Line()
    request = line.ask(FetchRequestContent(9, 2, ((*P0, 7), (*P0, 8)), ()))
    assert line.answer(request, (NO_ERROR, 9), P0) == [8]


def test_a_request_may_be_read_while_a_response_passes():
    line = Line()
    request = line.ask(ask(9, 1, {P0: 5, P1: 6}))
    observer = line.observer(request, 50.0)
    observer.session(NO_ERROR, 9)
    assert line.told(observer, P0) == 5
    line.ask(ask(9, 2, {P0: 70, P1: 80}))
    assert line.told(observer, P1) == 6
    assert line.told(observer, P0) == 5


def test_responses_that_were_left_out_are_passed_over():
    line = Line()
    line.ask(ask(0, -1, {P0: 1}))
    second = line.ask(ask(0, -1, {P0: 2}))
    assert line.answer(second, None, P0) == [2]


def test_answered_requests_are_let_go():
    def alive():
        gc.collect()
        kinds = FetchExchange, FetchRequestContent
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    before = alive()
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 0})), (NO_ERROR, 9))
    for epoch in range(1, 200):
        line.answer(line.ask(ask(9, epoch, {P0: epoch})), (NO_ERROR, 9))
    assert alive() - before <= 2


def test_a_connection_leaves_no_reference_cycles():
    def alive():
        return sum(isinstance(each, FetchExchange | Follower) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        line = Line()
        for session in (0, 9):
            observer = line.observer(line.ask(ask(0, 0, {P0: 0})), 1.0)
            observer.session(NO_ERROR, session)
            observer.ended()
        del observer
        for epoch in (1, 2):
            line.ask(ask(9, epoch, {P0: epoch}))
        del line
        assert alive() == before
    finally:
        gc.enable()


# Topics that are named by their ids


def test_an_unknown_id_waits_for_its_name_and_nothing_is_lost():
    line = Line()
    key = (ORDERS_ID, 3)
    first = line.ask(ask(0, 0, {key: 5}))
    observer = line.observer(first, 2.0)
    observer.session(NO_ERROR, 9)
    tell(observer, key)
    assert line.follower.seen == []
    line.ask(ask(9, 1, {key: 8}))
    line.names.resolved({ORDERS_ID: "orders"})
    assert line.follower.seen == [
        ("asked", "orders", 3, ORDERS_ID, 5, 1.0),
        ("answered", "orders", 3, ORDERS_ID, 5, 2.0),
        ("asked", "orders", 3, ORDERS_ID, 8, 2.0),
    ]
    line.ask(ask(9, 2, {key: 9}))
    assert line.follower.seen[-1] == ("asked", "orders", 3, ORDERS_ID, 9, 3.0)


def test_a_known_topic_does_not_wait_for_an_unknown_one():
    line = Line()
    line.names.resolved({ORDERS_ID: "orders"})
    line.ask(ask(0, 0, {(CLICKS_ID, 0): 1, (ORDERS_ID, 0): 2, (CLICKS_ID, 1): 3}))
    assert [seen[1:3] for seen in line.follower.seen] == [("orders", 0)]
    assert len(line.names.queue) == 2


def test_an_id_given_up_is_counted_and_what_comes_after_goes_on():
    line = Line()
    key = (ORDERS_ID, 0)
    line.answer(line.ask(ask(0, 0, {key: 5})), (NO_ERROR, 9))
    line.names.unresolvable([ORDERS_ID])
    assert line.names.lost == 1
    line.names.resolved({ORDERS_ID: "orders"})
    observer = line.observer(line.ask(ask(9, 1, {key: 6})), 7.0)
    tell(observer, key)
    assert line.follower.seen == [
        ("asked", "orders", 0, ORDERS_ID, 6, 3.0),
        ("answered", "orders", 0, ORDERS_ID, 6, 7.0),
    ]


# Fetch sessions


class Consumer:
    """One connection of a query's client, with its broker: in a session, or without one.

    As Kafka's own: a request is sent when the one before was answered, names in a session what is
    new or has moved, and forgets what is read no more. The broker leaves out what has no news.
    """

    def __init__(self, names, *, in_session, by_id):
        self.world = ProgressWorld()
        self.names = names
        self.reader = QueryReader(self.world.query(), 1)
        self.topic = ORDERS_ID if by_id else "t"
        self.in_session = in_session
        self.positions, self.asked = {}, {}
        self.session = None
        """What the broker has of it: the offset of each partition; None: there is none."""
        self.shown = set()
        """Those of which the broker has said something since they came, or had an error."""

    def fetch(self, news, *, is_refused=False):
        """Fetch; by partition what comes: an error, how many records, and whether they are seen.

        Refused, it gets an error for all, and in a session it has that no more.
        """
        epoch, forgotten = -1, []
        named = self.positions
        if self.in_session:
            epoch = 0 if self.session is None else 1
            before = self.session or {}
            named = {p: at for p, at in self.positions.items() if before.get(p) != at}
            forgotten = [(self.topic, p) for p in before.keys() - self.positions]
            self.session = dict(self.positions)
        self.shown &= self.positions.keys()
        self.asked = dict(self.positions)
        keys = {(self.topic, p): at for p, at in named.items()}
        request = ask(SESSION_ID if epoch > 0 else 0, epoch, keys, forgotten)
        observer = FetchExchange(self.reader, self.names, request, self.world.now_ms)
        observer.asked(self.world.now_ms)
        if is_refused:
            observer.session(SESSION_NOT_FOUND, 0)
            self.session, self.shown = None, set()
        else:
            observer.session(NO_ERROR, SESSION_ID if self.in_session else 0)
        for partition, at in () if is_refused else self.positions.items():
            error, count, is_seen = news.get(partition, (NO_ERROR, 0, True))
            if count or error or not self.in_session or partition not in self.shown:
                size, end = count * RECORD_BYTES, at + count if count and is_seen else None
                row = (partition, error, *((-1, -1) if error else (100, 100)), 0, size, end)
                observer.partitions(self.topic, [row])
                (self.shown.discard if error else self.shown.add)(partition)
        observer.ended()
        for partition, (error, count, _) in news.items():
            if partition in self.positions and not error:
                self.positions[partition] += count

    def step(self, what, *how):
        if what == "fetch":
            self.fetch(*how)
        elif what == "refuse":
            self.fetch({}, is_refused=True)
        elif what == "names":
            self.names.resolved({ORDERS_ID: "t"})
        elif what == "read":
            partition, at = how
            # Nobody sees that a client goes back to where it asked last.
            self.positions[partition] = at + (self.asked.get(partition) == at)
        elif what == "leave":
            self.positions.pop(*how, None)

    def known(self):
        self.names.resolved({ORDERS_ID: "t"})
        return {
            each.key: (
                *(each.position, list(each.delivered), each.refetched_records, each.open_ended),
                *(each.fetched_from, each.out_of_range_at, each.log.high_watermark),
            )
            for each in self.world.query().partitions.values()
        }


PARTITIONS = st.integers(0, 2)
NEWS = st.tuples(st.sampled_from([NO_ERROR] * 5 + [OUT_OF_RANGE]), st.integers(1, 5), st.booleans())
CONSUMED = st.lists(
    st.one_of(
        st.tuples(st.just("read"), PARTITIONS, st.integers(0, 40)),
        st.tuples(st.just("fetch"), st.dictionaries(PARTITIONS, NEWS)),
        st.tuples(st.just("fetch"), st.dictionaries(PARTITIONS, NEWS)),
        st.tuples(st.just("fetch"), st.just({})),
        st.tuples(st.just("leave"), PARTITIONS),
        st.tuples(st.sampled_from(["refuse", "names"])),
    ),
    min_size=5,
    max_size=40,
)


@pytest.mark.slow
@pytest.mark.parametrize("by_id", [False, True])
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=CONSUMED)
def test_in_a_session_the_same_is_known_as_without(steps, by_id):
    consumers = [
        Consumer(TopicNames(), in_session=in_session, by_id=by_id) for in_session in (False, True)
    ]
    for step in steps:
        for consumer in consumers:
            consumer.step(*step)
    without, within = (consumer.known() for consumer in consumers)
    assert within == without


def test_what_a_session_does_not_name_again_is_where_it_was_named_last():
    consumer = Consumer(TopicNames(), in_session=True, by_id=False)
    for partition, at in ((0, 5), (1, 6)):
        consumer.step("read", partition, at)
    consumer.fetch({0: (NO_ERROR, 3, True)})
    consumer.fetch({1: (NO_ERROR, 4, True)})
    consumer.fetch({1: (OUT_OF_RANGE, 0, True)})
    known = {key: each[1:2] + each[5:6] for (_, key), each in consumer.known().items()}
    assert known == {0: ([(5, 8)], None), 1: ([(6, 10)], 10)}


def test_following_may_begin_in_the_middle_of_a_session():
    consumer = Consumer(TopicNames(), in_session=True, by_id=False)
    consumer.positions, consumer.session = {0: 5, 1: 6}, {1: 6}
    consumer.fetch({0: (NO_ERROR, 1, True), 1: (NO_ERROR, 1, True)})
    assert consumer.known()["t", 0][:2] == (6, [(5, 6)])
    assert consumer.known()["t", 1][:2] == (None, [])
    consumer.fetch({1: (NO_ERROR, 2, True)})
    assert consumer.known()["t", 1][:2] == (9, [(7, 9)])
