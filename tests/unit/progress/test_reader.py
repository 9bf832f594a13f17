"""What Fetch requests and responses say of what was delivered, over one connection or several."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from progress_world import LARGE, Client, ProgressWorld

from proxy.progress.topics import TopicNames
from proxy.progress.tracker import MAX_CURSORS, FetchExchange, QueryReader
from proxy.wire.fetch import FetchRequestContent

OUT_OF_RANGE = 1
OLD_ID, NEW_ID = b"o" * 16, b"n" * 16


@pytest.fixture
def client(world):
    return Client(world)


def delivered(world):
    return list(world.part().delivered)


def test_what_was_delivered_is_known_from_the_next_position(world, client):
    client.read(10)
    assert delivered(world) == []
    client.read(25)
    assert delivered(world) == [(10, 25)]
    client.read(40)
    assert (delivered(world), world.part().position) == ([(10, 40)], 40)


def test_or_from_the_end_of_the_answer_and_not_counted_twice(world, client):
    client.read(10, end=25)
    assert delivered(world) == [(10, 25)]
    client.read(25, end=30)
    assert (delivered(world), world.part().refetched_records) == ([(10, 30)], 0)


def test_a_position_that_moves_without_records_was_only_sought(world, client):
    client.read(10, count=0)
    client.read(500)
    assert delivered(world) == []
    assert world.part().fetched_from == 10


def test_asking_again_from_the_same_place_delivers_nothing(world, client):
    for _ in range(3):
        client.read(10, count=0)
    assert (delivered(world), world.part().fetched_from) == ([], 10)


def test_a_lower_position_is_a_refetch_of_what_is_then_delivered(world, client):
    client.read(10, end=50)
    client.read(30, end=40)
    part = world.part()
    assert (part.refetched_records, part.refetched) == (10, (30, 40))
    client.read(40)
    client.read(70)
    assert (part.refetched_records, part.refetched) == (20, (40, 70))
    assert delivered(world) == [(10, 70)]
    assert world.kinds() == []


def test_executors_that_share_a_partition_do_not_mix(world, client):
    other = Client(world)
    client.read(0)
    other.read(100)
    client.read(20)
    other.read(130)
    assert delivered(world) == [(0, 20), (100, 130)]
    assert world.part().refetched_records == 0
    assert world.part().position == 20


def test_a_pipelined_answer_belongs_to_what_was_asked_for(world, client):
    client.ask(10)
    client.ask(50)
    client.answer(asked=10, end=20)
    client.answer(asked=50, end=60)
    assert delivered(world) == [(10, 20), (50, 60)]


def test_following_may_begin_amid_a_session(world, client):
    client.asked = None
    client.answer(hw=77, start=3)
    assert (
        world.part().log.high_watermark,
        world.part().log.log_start_offset,
        delivered(world),
    ) == (
        77,
        3,
        [],
    )
    client.read(10)
    client.read(20)
    assert delivered(world) == [(10, 20)]


def test_out_of_range_is_the_range_from_the_position_to_the_new_start(world, client):
    client.read(10, error=OUT_OF_RANGE, hw=-1, start=-1, count=0)
    client.read(10, error=OUT_OF_RANGE, hw=-1, start=-1, count=0)
    client.read(60)
    assert world.skipped() == [(10, 60, "out_of_range")]
    client.read(70)
    assert delivered(world) == [(60, 70)]
    assert world.kinds() == ["skipped"]


def test_out_of_range_is_not_lost_with_the_connection(world, client):
    client.read(10)
    client.read(10, error=OUT_OF_RANGE, hw=-1, start=-1, count=0)
    Client(world).read(60, start=60)
    assert world.skipped() == [(10, 60, "out_of_range")]
    Client(world).read(90, start=60)
    client.read(60, start=60)
    assert world.skipped() == [(10, 60, "out_of_range")]


def test_old_answers_do_not_tell_the_log_start(world, client):
    client.read(10, error=OUT_OF_RANGE, hw=-1, start=-1, count=0)
    Client(world).read(60, start=-1)
    Client(world).read(90, start=-1)
    assert world.skipped() == [(10, 60, "out_of_range")]


def test_another_executor_further_on_does_not_stretch_what_is_out_of_range(world, client):
    other = Client(world)
    other.read(500)
    client.read(10, error=OUT_OF_RANGE, count=0)
    other.read(700, start=60)
    assert world.skipped() == [(10, 60, "out_of_range")]


def test_another_executor_below_does_not_end_what_is_out_of_range(world, client):
    client.read(500, error=OUT_OF_RANGE, count=0)
    Client(world).read(3)
    client.read(600)
    assert world.skipped() == [(500, 600, "out_of_range")]


def test_out_of_range_beyond_the_end_skips_nothing(world, client):
    client.read(500, error=OUT_OF_RANGE, count=0)
    client.read(0)
    client.read(20)
    assert (world.skipped(), delivered(world)) == ([], [(0, 20)])


def test_out_of_range_that_was_an_error_of_the_moment(world, client):
    client.read(10, error=OUT_OF_RANGE, count=0)
    client.read(10)
    client.read(30)
    assert (world.skipped(), delivered(world)) == ([], [(10, 30)])


def test_a_range_is_counted_once_whichever_way_it_is_noticed(world, client):
    world.driver().batch(10, 10)
    client.read(10, error=OUT_OF_RANGE, count=0)
    client.read(60, start=60)
    assert world.skipped() == [(10, 60, "out_of_range")]
    assert world.part().skipped.records == 50


@pytest.mark.parametrize("error", [3, 6, 100])
def test_other_errors_say_nothing(world, client, error):
    client.read(10, error=error, hw=-1, start=-1, count=0)
    assert (world.part().log.high_watermark, world.skipped()) == (None, [])


def test_what_is_delivered_first_is_not_lost_to_retention(world, client):
    world.driver().batch(10, 10)
    client.read(10, end=30, start=0)
    client.read(50, end=60, start=40)
    assert world.skipped() == []
    world.driver(number=1).batch(10, 60, batch_id=1)
    assert world.skipped() == [(30, 40, "retention")]


def test_a_topic_made_anew_starts_over(world):
    old, new = Client(world, topic_id=OLD_ID), Client(world, topic_id=NEW_ID)
    old.read(10, end=50)
    new.read(0, hw=20, end=5)
    part = world.part()
    assert (part.log.topic_id, delivered(world), part.log.high_watermark) == (NEW_ID, [(0, 5)], 20)
    old.read(50, end=90, hw=1000)
    old.read(95)
    assert (delivered(world), part.log.high_watermark) == ([(0, 5)], 20)
    assert world.kinds() == ["recreated"]


def test_records_of_the_old_topic_are_not_delivered_of_the_new_one(world):
    old, new = Client(world, topic_id=OLD_ID), Client(world, topic_id=NEW_ID)
    old.read(10)
    new.read(0, hw=20, end=5)
    old.ask(15)
    assert delivered(world) == [(0, 5)]


def test_another_id_counts_only_once_the_broker_answers_to_it(world):
    old, new = Client(world, topic_id=OLD_ID), Client(world, topic_id=NEW_ID)
    old.read(10, end=50)
    new.read(0, error=100, count=0)
    assert (world.part().log.topic_id, world.kinds()) == (OLD_ID, [])


def test_without_topic_ids_there_is_one_topic(world):
    Client(world, topic_id=OLD_ID).read(10, end=20)
    Client(world).read(20, end=30)
    assert delivered(world) == [(10, 30)]


def test_the_leader_is_the_broker_at_the_other_end(world):
    Client(world, node_id=3).read(0)
    assert world.part().leader == 3
    Client(world, node_id=None).read(0)
    assert world.part().leader == 3


def test_a_reader_finds_the_partition_anew_when_the_query_let_go_of_it(world, client):
    client.read(10)
    world.query().revoke(world.part(), "gone", 0.0)
    client.read(20, end=30)
    assert delivered(world) == [(20, 30)]


def test_records_behind_a_log_end_that_the_broker_has_looked_up_before(world, client):
    client.read(0, hw=1, end=20, count=900)
    client.read(20, hw=40, end=40, count=900)
    client.read(40, hw=50, count=900)  # in pieces, so that its end is not known
    client.read(60, hw=80, end=80, count=900)
    assert delivered(world) == [(0, 80)]
    assert world.part().log.high_watermark == 80


def test_offsets_that_no_client_asks_for_do_no_harm(world, client):
    client.read(-1)
    client.read(10)
    client.read(-7)
    client.read(2**63 - 1)
    client.read(5, end=2**63 - 1)
    assert delivered(world) == [(5, 1000)]


def test_partitions_that_were_let_go_of_do_not_pile_up(world):
    client = Client(world)
    for number in range(MAX_CURSORS + 10):
        client.ask(0, partition=number)
        world.query().revoke(world.part(partition=number), "gone", 0.0)
    assert client.follower.size <= MAX_CURSORS


class Naive:
    """One connection that reads, and keeps which offsets it is known to have been given."""

    def __init__(self, world, known, again):
        self.client = Client(world)
        self.known, self.again = known, again
        self.position = None
        self.unseen = range(0)

    def note(self, offsets):
        self.again.extend(offset for offset in offsets if offset in self.known)
        self.known.update(offsets)

    def ask(self, position):
        """What passed unseen is known when the connection reads on behind it."""
        self.note(self.unseen if position == self.unseen.stop else range(0))
        self.unseen = range(0)
        self.position = position
        self.client.ask(position)

    def answer(self, count, seen):
        got = range(self.position, self.position + count)
        self.client.answer(count=count, end=got.stop if seen else LARGE)
        if seen:
            self.note(got)
        elif got:
            self.unseen = got
        self.position = got.stop


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.none() | st.integers(0, 60), st.integers(0, 9), st.booleans()),
    max_size=50,
)


@given(STEPS)
def test_several_connections_deliver_what_each_was_given(steps):
    """Each step: a connection seeks or not, asks, and is given so many records, seen or unseen."""
    world, known, again = ProgressWorld(), set(), []
    readers = [Naive(world, known, again) for _ in range(3)]
    for number, sought, count, seen in steps:
        reader = readers[number]
        if reader.position is not None:
            reader.ask(reader.position)
        if sought is not None or reader.position is None:
            reader.ask(sought or 0)
        reader.answer(count, seen)
    if steps:
        part = world.part()
        assert {n for low, high in part.delivered for n in range(low, high)} == known
        assert part.refetched_records == len(again)


def test_it_follows_what_the_fetches_of_a_connection_tell(world):
    """An incremental session: the second request names no partition that did not move."""
    names = TopicNames()
    names.resolved({OLD_ID: "t"})
    reader = QueryReader(world.query(), 3)

    def exchange(session_id, epoch, positions, answered):
        ask = FetchRequestContent(
            session_id, epoch, tuple((OLD_ID, *each) for each in positions), ()
        )
        observer = FetchExchange(reader, names, ask, world.now_ms)
        observer.asked(world.now_ms)
        observer.session(0, 7)
        for partition, count in answered:
            observer.partitions(OLD_ID, [(partition, 0, 100, 100, 0, count, LARGE)])

    exchange(0, 0, [(0, 10), (1, 0)], [(0, 5), (1, 0)])
    exchange(7, 1, [(0, 30)], [(1, 9)])
    exchange(7, 2, [(1, 20)], [])
    assert list(world.part().delivered) == [(10, 30)]
    assert list(world.part(partition=1).delivered) == [(0, 20)]
    assert world.part().leader == 3
