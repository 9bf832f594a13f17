"""Fetch sessions, followed and compared with a model that keeps everything."""

import gc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.progress.topics import TopicNames
from proxy.progress.tracker import (
    MAX_SESSION_PARTITIONS,
    FetchAnswer,
    FetchSession,
    FetchTracker,
)
from proxy.wire.fetch import FetchRequestPartitions

NO_ERROR = 0
SESSION_NOT_FOUND = 70
INVALID_EPOCH = 71
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
    return FetchRequestPartitions(
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
    """A tracker with short ways to use it; the time goes up with each step."""

    def __init__(self, names=None):
        self.follower = Follower()
        self.names = names or TopicNames()
        self.tracker = FetchTracker(self.names, self.follower)
        self.now_ms = 0.0

    @property
    def kept(self):
        """How many partitions of the present session are known."""
        session = self.tracker.session
        return sum(map(len, session.positions.values())) if session is not None else 0

    def ask(self, request):
        self.now_ms += 1
        self.tracker.asked(request, self.now_ms)
        return request

    def answer(self, request, session, *keys):
        """Answer; `session` is (error code, session id), None before version 7."""
        self.now_ms += 1
        observer = self.tracker.observer(request, self.now_ms)
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


def test_before_version_7_there_are_no_sessions():
    line = Line()
    first = line.ask(ask(0, -1, {P0: 5, P1: 6}))
    assert line.answer(first, None, P0, P1) == [5, 6]
    second = line.ask(ask(0, -1, {P0: 8}))
    assert line.answer(second, None, P0, P1) == [8, None]
    assert line.kept == 0


def test_an_incremental_request_leaves_the_others_as_they_were():
    line = Line()
    first = line.ask(ask(0, 0, {P0: 5, P1: 6}))
    assert line.answer(first, (NO_ERROR, 9), P0) == [5]
    second = line.ask(ask(9, 1, {P0: 8}))
    assert line.answer(second, (NO_ERROR, 9), P1, P0) == [6, 8]
    third = line.ask(ask(9, 2, {}))
    assert line.answer(third, (NO_ERROR, 9), P1) == [6]


def test_forgotten_partitions_leave():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {P2: 1}, [P0, ("not there", 4)]))
    assert line.answer(second, (NO_ERROR, 9), P0, P1, P2) == [None, 6, 1]
    assert line.kept == 2


def test_a_partition_named_and_forgotten_at_once_leaves():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {P0: 7, P1: 8}, [P0, P1]))
    assert line.answer(second, (NO_ERROR, 9), P0, P1) == [None, None]


def test_the_broker_may_make_no_session():
    line = Line()
    first = line.ask(ask(0, 0, {P0: 5}))
    assert line.answer(first, (NO_ERROR, 0), P0) == [5]
    assert line.kept == 0


@pytest.mark.parametrize("error", [SESSION_NOT_FOUND, INVALID_EPOCH])
def test_after_an_error_the_session_is_gone(error):
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    line.answer(line.ask(ask(9, 4, {P0: 7})), (error, 0))
    assert line.kept == 0
    third = line.ask(ask(0, 0, {P1: 8}))
    assert line.answer(third, (NO_ERROR, 10), P0, P1) == [None, 8]


def test_a_session_that_the_broker_closed_is_gone():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5})), (NO_ERROR, 9))
    line.answer(line.ask(ask(9, 1, {})), (NO_ERROR, 0))
    assert line.kept == 0


@pytest.mark.parametrize("epoch", [0, -1])
def test_a_full_request_closes_the_session_that_it_names(epoch):
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5})), (NO_ERROR, 9))
    line.answer(line.ask(ask(9, epoch, {P1: 6})), (NO_ERROR, 0))
    assert line.kept == 0


def test_a_full_request_that_fails_makes_no_session():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5})), (SESSION_NOT_FOUND, 9))
    assert line.kept == 0


def test_a_request_without_session_leaves_the_session_alone():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    between = line.ask(ask(0, -1, {P0: 50}))
    assert line.answer(between, (NO_ERROR, 0), P0, P1) == [50, None]
    third = line.ask(ask(9, 1, {}))
    assert line.answer(third, (NO_ERROR, 9), P0, P1) == [5, 6]


def test_following_may_begin_in_the_middle_of_a_session():
    line = Line()
    first = line.ask(ask(9, 40, {P0: 5}))
    assert line.answer(first, (NO_ERROR, 9), P0, P1) == [5, None]
    second = line.ask(ask(9, 41, {P1: 6}))
    assert line.answer(second, (NO_ERROR, 9), P0, P1) == [5, 6]


def test_pipelined_requests_are_answered_as_of_their_own_time():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {P0: 7}))
    third = line.ask(ask(9, 2, {P0: 8, P2: 1}, [P1]))
    fourth = line.ask(ask(9, 3, {P0: 9, P1: 60}))
    assert line.answer(second, (NO_ERROR, 9), P0, P1, P2) == [7, 6, None]
    assert line.answer(third, (NO_ERROR, 9), P0, P1, P2) == [8, None, 1]
    assert line.answer(fourth, (NO_ERROR, 9), P0, P1, P2) == [9, 60, 1]


def test_what_only_a_later_one_of_several_changed_is_not_seen_before():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {P0: 7}))
    third = line.ask(ask(9, 2, {P0: 8}))
    line.ask(ask(9, 3, {P1: 60}))
    assert line.answer(second, (NO_ERROR, 9), P1) == [6]
    assert line.answer(third, (NO_ERROR, 9), P1) == [6]


def test_of_a_partition_named_twice_the_last_offset_counts():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {}))
    third = line.ask(FetchRequestPartitions(9, 2, ((*P0, 7), (*P0, 8)), ()))
    assert line.answer(second, (NO_ERROR, 9), P0) == [5]
    assert line.answer(third, (NO_ERROR, 9), P0) == [8]


def test_a_request_may_be_read_while_a_response_passes():
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 5, P1: 6})), (NO_ERROR, 9))
    second = line.ask(ask(9, 1, {}))
    observer = line.tracker.observer(second, 50.0)
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


def test_only_shown_requests_can_be_answered():
    line = Line()
    request = line.ask(ask(0, -1, {P0: 1}))
    line.answer(request, None)
    with pytest.raises(ValueError, match="not shown"):
        line.tracker.observer(request, 1.0)


def test_the_session_is_bounded():
    line = Line()
    many = {("orders", n): n for n in range(MAX_SESSION_PARTITIONS + 2)}
    first = line.ask(ask(0, 0, many))
    assert len(line.follower.seen) == len(many), "all are told nevertheless"
    beyond = ("orders", MAX_SESSION_PARTITIONS)
    assert line.answer(first, (NO_ERROR, 9), P0, beyond) == [0, None]
    line.answer(line.ask(ask(9, 1, {("clicks", n): n for n in range(5)})), (NO_ERROR, 9))
    assert line.kept == MAX_SESSION_PARTITIONS
    third = line.ask(ask(9, 2, {beyond: 3, P1: 77}, [P0]))
    line.tracker.observer(third, 1.0)
    fourth = line.ask(ask(9, 3, {beyond: 4}))
    assert line.answer(fourth, (NO_ERROR, 9), beyond, P1, P0) == [4, 77, None]


def test_answered_requests_are_let_go():
    def alive():
        gc.collect()
        return sum(isinstance(each, FetchAnswer) for each in gc.get_objects())

    before = alive()
    line = Line()
    line.answer(line.ask(ask(0, 0, {P0: 0})), (NO_ERROR, 9))
    for epoch in range(1, 200):
        line.answer(line.ask(ask(9, epoch, {P0: epoch})), (NO_ERROR, 9))
    assert alive() - before <= 2


def test_a_tracker_leaves_no_reference_cycles():
    def alive():
        kinds = FetchAnswer, FetchSession, FetchTracker
        return sum(isinstance(each, kinds) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = alive()
        line = Line()
        for session in (0, 9):
            observer = line.tracker.observer(line.ask(ask(0, 0, {P0: 0})), 1.0)
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
    observer = line.tracker.observer(first, 2.0)
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


def test_an_id_given_up_is_counted_and_the_session_goes_on():
    line = Line()
    key = (ORDERS_ID, 0)
    line.answer(line.ask(ask(0, 0, {key: 5})), (NO_ERROR, 9))
    line.names.unresolvable([ORDERS_ID])
    assert line.names.lost == 1
    line.names.resolved({ORDERS_ID: "orders"})
    observer = line.tracker.observer(line.ask(ask(9, 1, {})), 7.0)
    tell(observer, key)
    assert line.follower.seen == [("answered", "orders", 0, ORDERS_ID, 5, 7.0)]


# Against a model


class Model:
    """Keeps everything, in the order of the answers, as a broker does."""

    def __init__(self):
        self.session = None
        """Its id and positions."""
        self.as_of = {}
        """A copy of all that was asked for when the request was answered that was last."""
        self.seen = []

    def ask(self, request, now_ms):
        for topic, partition, offset in request.positions:
            self.seen.append(("asked", topic, partition, offset, now_ms))

    def answer(self, request, error_code, session_id, now_ms):
        self.answered_ms = now_ms
        is_full = request.session_epoch in (0, -1)
        is_named = self.session is not None and self.session[0] == request.session_id
        if is_full and is_named:
            self.session = None
        session = [None, {}] if is_full else [request.session_id, {}]
        if not is_full:
            session = self.session = self.session if is_named else session
        for topic, partition, offset in request.positions:
            session[1][topic, partition] = offset
        if not is_full:
            for key in request.forgotten:
                session[1].pop(key, None)
            if error_code != NO_ERROR or session_id != request.session_id:
                self.session = None
        elif request.session_epoch == 0 and error_code == NO_ERROR and session_id != 0:
            session[0] = session_id
            self.session = session
        self.as_of = dict(session[1])

    def tell(self, key):
        self.seen.append(("answered", *key, self.as_of.get(key), self.answered_ms))


BY_NAME = [(topic, n) for topic in ("orders", "clicks") for n in range(3)]
NAMES = {ORDERS_ID: "orders", CLICKS_ID: "clicks"}
BY_ID = [(topic_id, n) for topic_id in NAMES for n in range(3)]
SESSIONS = st.sampled_from([1] * 8 + [0, 2])


def steps(keys):
    key = st.sampled_from(keys)
    positions = st.dictionaries(key, st.integers(0, 99), max_size=4)
    full = st.builds(ask, SESSIONS, st.sampled_from([0, 0, 0, -1]), positions, st.sets(key))
    incremental = st.builds(ask, SESSIONS, st.integers(1, 9), positions, st.sets(key, max_size=2))
    error = st.sampled_from([NO_ERROR] * 6 + [SESSION_NOT_FOUND, INVALID_EPOCH, 3])
    return st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.one_of(full, incremental, incremental, incremental)),
            st.tuples(st.just("answer"), st.tuples(error, SESSIONS)),
            st.tuples(st.just("tell"), key),
            st.tuples(st.just("tell"), key),
            st.tuples(st.just("end"), st.none()),
            st.tuples(st.just("names"), st.sets(st.sampled_from(list(NAMES)))),
        ),
        min_size=15,
        max_size=60,
    )


def run(script, names):
    """Play a script to the tracker and to the model; return what each was told."""
    line, model = Line(names), Model()
    pending = []
    passing = None
    for step, what in script:
        if step == "ask":
            line.ask(what)
            pending.append(what)
            model.ask(what, line.now_ms)
        elif step == "answer" and pending:
            request = pending.pop(0)
            observer = line.tracker.observer(request, line.now_ms)
            observer.session(*what)
            model.answer(request, *what, line.now_ms)
            passing = observer
        elif step == "tell" and passing is not None:
            tell(passing, what)
            model.tell(what)
        elif step == "end" and passing is not None:
            passing.ended()
            passing = None
        elif step == "names":
            names.resolved({each: NAMES[each] for each in what})
        known = len(model.session[1]) if model.session is not None else 0
        assert line.kept == known
    return line.follower.seen, model.seen


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=steps(BY_NAME))
def test_it_says_what_the_model_says(script):
    seen, expected = run(script, TopicNames())
    assert [each[:3] + each[4:] for each in seen] == expected


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(script=steps(BY_ID))
def test_names_that_come_late_change_nothing_that_is_told_of_a_topic(script):
    names = TopicNames()
    seen, expected = run(script, names)
    told = len(seen)
    names.resolved(NAMES)
    assert (len(names.queue), names.lost) == (0, 0)
    assert len(seen) == len(expected) >= told
    for topic_id, name in NAMES.items():
        got = [each[:3] + each[4:] for each in seen if each[1:4:2] == (name, topic_id)]
        assert got == [(each[0], name, *each[2:]) for each in expected if each[1] == topic_id]
