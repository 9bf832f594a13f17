"""Reading on, where a partition takes a short way, against partitions that never take it."""

from hypothesis import given
from hypothesis import strategies as st
from progress_world import Client, ProgressWorld

from proxy.progress.offset_ranges import OffsetRanges, SkipReason
from proxy.progress.report import BatchRange

OUT_OF_RANGE = 1
MAX_WAIT_MS = 2000


class PlainRanges(OffsetRanges):
    """Ranges that are only added to in the general way."""

    __slots__ = ()

    def extend(self, _start, _end):
        return False


class PlainWorld(ProgressWorld):
    def query(self, client_id="orders"):
        query = super().query(client_id)
        for partition in query.partitions.values():
            if type(partition.delivered) is OffsetRanges:
                assert not partition.delivered
                partition.delivered = PlainRanges()
        return query


OFFSETS = st.integers(0, 60)
BEHIND = st.sampled_from([0, 0, 3])
SEEN = [True, True, True, False]
STEPS = st.lists(
    st.one_of(
        *[st.tuples(st.just("read"), st.integers(0, 9), BEHIND, st.sampled_from(SEEN))] * 6,
        st.tuples(st.just("seek"), OFFSETS),
        st.tuples(st.just("fails"), st.sampled_from([OUT_OF_RANGE, 6])),
        st.tuples(st.just("complete"), st.integers(0, 9)),
        st.tuples(st.just("skip"), OFFSETS, OFFSETS),
        st.tuples(st.just("restart")),
        st.tuples(st.just("wait"), st.integers(0, MAX_WAIT_MS)),
        st.tuples(st.just("start"), OFFSETS),
    ),
    max_size=40,
)


def state(part, world):
    return (
        (part.position, part.lag_records(), part.lag_ms(world.now_ms), part.pending),
        (list(part.delivered), list(part.failed), list(part.skipped.known), part.skipped.records),
        (part.refetched, part.refetched_records, part.fetched_from, part.out_of_range_at),
        (part.stuck, part.stuck_since_ms, part.committed_to, world.kinds()),
    )


def histories(world, steps):
    """Play the steps to a world; yield after each of them what is known of the partition."""
    client, position, end, runs = Client(world), 0, 0, 0
    client.ask(0)
    part = world.query().partitions["t", 0]
    for what, *values in steps:
        if what == "read":
            count, behind, is_seen = values
            end = max(end, position + count + behind)
            client.ask(position)
            position += count
            client.answer(count=count, end=position if count and is_seen else None, hw=end)
        elif what == "seek":
            position = values[0]
        elif what == "fails":
            client.read(position, error=values[0], count=0, hw=-1, start=-1)
        elif what == "complete" and part.position is not None:
            read = BatchRange(None, max(part.position - values[0], 0))
            part.complete(read, f"run-{runs}", None, world.now_ms, world.now_s)
        elif what == "skip":
            part.skip(min(values), max(values), SkipReason.UNEXPLAINED, world.now_ms)
        elif what == "restart":
            runs += 1
            list(world.query().beginning_run(f"run-{runs}", world.now_ms, world.now_ms))
        elif what == "wait":
            world.pass_ms(values[0])
            part.check_stuck(world.now_ms, MAX_WAIT_MS)
        elif what == "start":
            part.log.record_start(values[0])
        yield state(part, world)


@given(STEPS)
def test_it_comes_to_the_same(steps):
    assert list(histories(ProgressWorld(), steps)) == list(histories(PlainWorld(), steps))
