import gc
import tracemalloc
from collections import defaultdict, deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_parts import graph, snapshot, stage

from proxy.admin.document_models import RowContext
from proxy.admin.pipeline_documents import COMPLETION
from proxy.pipeline.completion import (
    MAX_DEFERRED,
    MAX_WAIT_MS,
    OFFSETS_REUSED,
    PIPELINE_CHANGED,
    SWEEP_AT,
    TOO_MANY_EDGES,
    CompletionTracker,
    StageBatch,
)
from proxy.pipeline.graph import PendingLimit
from proxy.pipeline.ledger import (
    BUCKETS,
    MAX_EDGES,
    TIMED_OUT,
    Ledger,
    PendingEdges,
    SourceBatch,
    TopicRange,
    WallClockOffset,
)
from proxy.state import UnwrittenRecords

TIMEOUT_MS = 600_000.0
NOW_S = 1_700_000_000.0
MIB = 2**20


CHAIN = (stage("one", "A", "B"), stage("two", "B", "C"), stage("three", "C"))
DIAMOND = (
    stage("one", "A", "B C"),
    stage("two", "B", "D"),
    stage("three", "B C", "E"),
    stage("four", "D E A"),
)
JOIN = (stage("one", "A", "B"), stage("two", "B A", "C"), stage("three", "C"))


def make(stages=CHAIN, *, max_edges=MAX_EDGES, **settings):
    return CompletionTracker(
        graph(stages, **{"timeout_ms": TIMEOUT_MS} | settings),
        UnwrittenRecords(),
        random=Random(1),
        now_ms=0.0,
        now_s=NOW_S,
        max_edges=max_edges,
    )


def update(completion, stages, timeout_ms, now_ms):
    completion.update(graph(stages, timeout_ms=timeout_ms), now_ms)


def ranges(text):
    """Read `B0:5-9 C1:0-3`: topic, partition, offsets."""
    found = []
    for part in text.split():
        where, offsets = part.split(":")
        start, end = offsets.split("-")
        found.append(TopicRange(where[0], int(where[1:]), int(start), int(end)))
    return tuple(found)


def batch(stage, number, inputs, outputs="", started_ms=0.0, size_bytes=0):
    return StageBatch(stage, number, ranges(inputs), ranges(outputs), started_ms, size_bytes)


def outcome(end):
    if end.reason in ("", TIMED_OUT):
        return end.reason or "completed", ""
    return "failed", end.reason


def told(completion):
    return [
        (end.owner.stage, end.owner.batch, *outcome(end)) for end in completion.ledger.take_ended()
    ]


def document_of(completion):
    return COMPLETION.document(completion, RowContext(0.0))


def pending_at(completion):
    """Return by the source batch where it waits."""
    return {one["batch"]: one["waits_at"] for one in document_of(completion)["pending"]["first"]}


def done(*numbers, stage="one"):
    return [(stage, number, "completed", "") for number in numbers]


# Batches in order of report; after each what was told and where the rest waits.
SCENARIOS = [
    pytest.param(
        CHAIN,
        [
            (("one", 1, "A0:0-10", "B0:0-5 B1:0-5"), [], {1: "two"}),
            (("two", 1, "B0:0-5", "C0:0-2"), [], {1: "two"}),
            (("two", 2, "B1:0-5"), [], {1: "three"}),
            (("three", 1, "C0:0-2"), done(1), {}),
        ],
        id="a chain",
    ),
    pytest.param(
        CHAIN,
        [(("one", 1, "A0:0-10"), done(1), {})],
        id="the first stage filters everything",
    ),
    pytest.param(
        CHAIN,
        [
            (("one", 1, "A0:0-10", "B0:0-5"), [], {1: "two"}),
            (("two", 1, "B0:0-5"), done(1), {}),
        ],
        id="a later stage filters everything",
    ),
    pytest.param(
        CHAIN,
        [
            (("one", 1, "A0:0-10", "B0:0-5"), [], {1: "two"}),
            (("two", 1, "B0:0-3", "C0:0-3"), [], {1: "two"}),
            (("three", 1, "C0:0-3"), [], {1: "two"}),
            (("two", 2, "B0:3-5", "C0:3-5"), [], {1: "three"}),
            (("three", 2, "C0:3-5"), done(1), {}),
        ],
        id="ranges are completed in part",
    ),
    pytest.param(
        CHAIN,
        [
            (("one", 1, "A0:0-10", "B0:0-5"), [], {1: "two"}),
            (("one", 2, "A0:10-20", "B0:5-9"), [], {1: "two", 2: "two"}),
            (("one", 3, "A0:20-30", "B0:9-12"), [], {1: "two", 2: "two", 3: "two"}),
            (("two", 1, "B0:0-7", "C0:0-7"), [], {1: "three", 2: "two", 3: "two"}),
            (("two", 2, "B0:7-12", "C0:7-9"), [], {1: "three", 2: "three", 3: "three"}),
            (("three", 1, "C0:0-7"), done(1), {2: "three", 3: "three"}),
            (("three", 2, "C0:7-9"), done(2, 3), {}),
        ],
        id="several roots flow together",
    ),
    pytest.param(
        DIAMOND,
        [
            (("one", 1, "A0:0-10", "B0:0-5 C0:0-5"), [], {1: "two"}),
            (("two", 1, "B0:0-5", "D0:0-5"), [], {1: "three"}),
            (("three", 1, "B0:0-5", "E0:0-1"), [], {1: "three"}),
            (("three", 2, "C0:0-5"), [], {1: "four"}),
            (("four", 1, "D0:0-5"), [], {1: "four"}),
            (("four", 2, "E0:0-1"), done(1), {}),
        ],
        id="a topic with two consumers, and a stage with two inputs",
    ),
    pytest.param(
        DIAMOND,
        [
            (("one", 1, "A0:0-10", "B0:0-5"), [], {1: "two"}),
            (("two", 1, "B0:0-5", "D0:0-5"), [], {1: "three"}),
            (("three", 1, "B0:0-5"), [], {1: "four"}),
            (("four", 9, "D0:0-5 A0:0-10"), [*done(1), *done(9, stage="four")], {}),
        ],
        id="a stage that reads a source and another stage is the root of the one only",
    ),
    pytest.param(
        JOIN,
        [
            (("one", 1, "A0:0-10", "B0:0-5"), [], {1: "two"}),
            (("two", 9, "B0:0-5 A0:0-10", "C0:0-5"), [], {1: "three", 9: "three"}),
            (("three", 1, "C0:0-5"), [*done(1), *done(9, stage="two")], {}),
        ],
        id="a stage that joins a source to what it reads of another stage",
    ),
    pytest.param(
        CHAIN,
        [
            (("one", 1, "A0:0-10", "B0:0-5 B0:3-9 B0:9-9"), [], {1: "two"}),
            (("two", 1, "B0:0-6 B0:2-9"), done(1), {}),
        ],
        id="ranges of a batch overlap",
    ),
    pytest.param(
        CHAIN,
        [
            (("one", 1, "A0:5-5 A1:0-0"), [], {}),
            (("one", 2, ""), [], {}),
        ],
        id="nothing was read, nothing is a root",
    ),
]


@pytest.mark.parametrize(("stages", "steps"), SCENARIOS)
def test_scenarios(stages, steps):
    completion = make(stages)
    for now_ms, (what, ends, waits) in enumerate(steps, 1):
        completion.stage_batch(batch(*what), float(now_ms))
        assert told(completion) == ends
        assert pending_at(completion) == waits
    assert completion.edges.size == 0


def test_tells_owner_and_times():
    completion = make()
    completion.stage_batch(batch("one", 4, "A0:0-1", "B0:0-1", 5.0, size_bytes=77), 10.0)
    completion.stage_batch(batch("two", 1, "B0:0-1", "", 11.0), 12.0)
    (end,) = completion.ledger.take_ended()
    assert (end.owner.size_bytes, end.started_ms, end.ended_ms) == (77, 5.0, 12.0)


class TestBadInput:
    def test_topics_that_are_not_of_the_stage_are_left_out_and_counted(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10 C0:0-3 Z0:0-3", "B0:0-5 C0:5-9"), 1.0)
        assert completion.counts.unknown_topics == 3
        assert completion.edges.partitions.keys() == {("two", "B", 0)}

    def test_edges_completed_twice_are_reported_and_change_nothing(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:0-5 B1:0-5"), 1.0)
        for _ in range(2):
            completion.stage_batch(batch("two", 1, "B0:0-5", "C0:0-2"), 2.0)
        assert completion.counts.repeated_records == 5
        assert "a second time" in completion.notes[-1][1]
        assert pending_at(completion) == {1: "two"}
        completion.stage_batch(batch("two", 2, "B1:0-5"), 3.0)
        assert told(completion) == []
        completion.stage_batch(batch("three", 1, "C0:0-2"), 3.0)
        assert told(completion) == done(1)

    def test_input_completed_twice_with_other_output_leaves_the_root_as_it_is(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:0-5 B1:0-5"), 1.0)
        completion.stage_batch(batch("two", 1, "B0:0-5", "C0:0-2"), 2.0)
        completion.stage_batch(batch("two", 1, "B0:0-5", "C0:2-4"), 2.0)
        assert completion.counts.unanchored_ranges == 1
        completion.stage_batch(batch("two", 2, "B1:0-5"), 3.0)
        assert told(completion) == []
        completion.stage_batch(batch("three", 1, "C0:0-4"), 3.0)
        assert told(completion) == done(1)
        assert completion.counts.foreign_records == 2

    def test_records_of_other_producers_are_counted(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:5-9"), 1.0)
        completion.stage_batch(batch("two", 1, "B0:0-9"), 2.0)
        assert told(completion) == done(1)
        assert completion.counts.foreign_records == 5

    def test_acks_after_the_end_are_counted(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:0-5"), 1.0)
        (root,) = completion.ledger.roots.keys()
        completion.ledger.fail(root, "error", 2.0)
        completion.ledger.fail(root, "error", 2.0)
        assert told(completion) == [("one", 1, "failed", "error")]
        completion.stage_batch(batch("two", 1, "B0:0-5", "C0:0-2"), 3.0)
        assert completion.counts.late_acks == 1
        assert (len(completion.ledger.roots), completion.edges.size) == (0, 0)

    def test_a_topic_made_anew_fails_what_waited_for_the_old_one(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:100-105"), 1.0)
        completion.stage_batch(batch("one", 2, "A0:10-20", "B0:0-103"), 2.0)
        assert told(completion) == [("one", 1, "failed", OFFSETS_REUSED)]
        completion.stage_batch(batch("two", 1, "B0:0-103"), 3.0)
        assert told(completion) == done(2)

    def test_stages_may_be_written_in_any_order(self):
        completion = make(CHAIN[::-1])
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:0-5"), 1.0)
        assert pending_at(completion) == {1: "two"}
        completion.stage_batch(batch("two", 1, "B0:0-5"), 2.0)
        assert told(completion) == done(1)


class TestEarly:
    """Stage two reports what it read while stage one was still writing."""

    def make(self):
        completion = make()
        completion.stage_batch(batch("one", 1, "A0:0-10", "B0:0-5", 10.0), 20.0)
        completion.stage_batch(batch("two", 1, "B0:0-8", "C0:0-8", 25.0), 30.0)
        assert pending_at(completion) == {1: "two"}
        assert len(completion.early) == 1
        return completion

    def test_waits_for_the_report_of_what_it_read(self):
        completion = self.make()
        completion.stage_batch(batch("one", 2, "A0:10-20", "B0:5-9", 20.0), 40.0)
        assert pending_at(completion) == {1: "three", 2: "two"}
        completion.stage_batch(batch("three", 1, "C0:0-8", "", 41.0), 42.0)
        completion.stage_batch(batch("two", 2, "B0:8-9", "", 43.0), 44.0)
        assert told(completion) == done(1, 2)

    def test_goes_on_when_the_stage_before_began_anew(self):
        completion = self.make()
        completion.stage_batch(batch("one", 2, "A0:10-20", "", 29.0), 40.0)
        assert pending_at(completion) == {1: "two"}
        completion.stage_batch(batch("one", 3, "A0:20-30", "", 30.0), 50.0)
        assert pending_at(completion) == {1: "three"}
        assert completion.counts.foreign_records == 3

    def test_goes_on_when_the_stage_before_is_idle(self):
        completion = self.make()
        completion.idle("one", 29.0)
        completion.idle("nobody", 35.0)
        assert pending_at(completion) == {1: "two"}
        completion.idle("one", 35.0)
        assert pending_at(completion) == {1: "three"}

    def test_goes_on_after_a_time(self):
        completion = self.make()
        completion.tick(30.0 + MAX_WAIT_MS - 1)
        assert pending_at(completion) == {1: "two"}
        completion.tick(30.0 + MAX_WAIT_MS)
        assert pending_at(completion) == {1: "three"}
        assert completion.forced_batches == 1
        assert "not known who" in completion.notes[-1][1]

    def test_the_first_goes_on_when_too_many_wait(self):
        completion = self.make()
        for number in range(MAX_DEFERRED - 1):
            completion.stage_batch(batch("two", number, "B0:8-9", "", 25.0), 31.0)
            assert pending_at(completion) == {1: "two"}
        completion.stage_batch(batch("two", MAX_DEFERRED, "B0:9-10", "", 25.0), 31.0)
        assert pending_at(completion) == {1: "three"}

    def test_later_batches_of_the_stage_wait_their_turn(self):
        completion = self.make()
        completion.stage_batch(batch("two", 2, "B1:0-0", "C0:8-9", 31.0), 32.0)
        completion.stage_batch(batch("three", 1, "C0:0-9", "", 33.0), 34.0)
        assert len(completion.early) == 3
        completion.idle("two", 35.0)  # it is not: its batches wait
        assert len(completion.early) == 3
        completion.idle("one", 36.0)
        assert told(completion) == done(1)
        assert len(completion.early) == 0


FULL = [
    # limits, sizes in flight, full
    pytest.param((None, None), [10**12] * 3, False, id="without limits never"),
    pytest.param((2, None), [0], False, id="below the batches"),
    pytest.param((2, None), [0, 0], True, id="at the batches"),
    pytest.param((None, 100), [60, 39], False, id="below the bytes"),
    pytest.param((None, 100), [60, 40], True, id="at the bytes"),
    pytest.param((5, 100), [200], True, id="either limit is enough"),
    pytest.param((1, None), [], False, id="nothing in flight"),
]


@pytest.mark.parametrize(("limits", "sizes", "full"), FULL)
def test_is_full_at_either_limit(limits, sizes, full):
    completion = make(max_pending=PendingLimit(batches=limits[0], size_bytes=limits[1]))
    for number, size_bytes in enumerate(sizes):
        ranges_of = [f"{topic}0:{number}-{number + 1}" for topic in "AB"]
        completion.stage_batch(batch("one", number, *ranges_of, size_bytes=size_bytes), 1.0)
    assert completion.is_full() is full


class TestMaxPending:
    def test_is_full_until_roots_end_however_they_end(self):
        completion = make(max_pending=PendingLimit(batches=2, size_bytes=100))
        completion.stage_batch(batch("one", 1, "A0:0-1", "B0:0-1", size_bytes=60), 1.0)
        assert not completion.is_full()
        completion.stage_batch(batch("one", 2, "A0:1-2", "B0:1-2", size_bytes=1), 1.0)
        assert completion.is_full()
        completion.stage_batch(batch("two", 1, "B0:0-1"), 2.0)
        assert not completion.is_full()
        completion.stage_batch(batch("one", 3, "A0:2-3", "B0:2-3", size_bytes=99), 3.0)
        assert completion.is_full()
        completion.tick(3.0 + TIMEOUT_MS * BUCKETS)
        assert not completion.is_full()
        assert [end[2] for end in told(completion)] == ["completed", "timed_out", "timed_out"]
        assert completion.ledger.pending_bytes == 0

    def test_a_batch_that_ends_at_once_is_never_in_flight(self):
        completion = make(max_pending=PendingLimit(batches=1))
        completion.stage_batch(batch("one", 1, "A0:0-1", size_bytes=60), 1.0)
        assert (completion.is_full(), completion.ledger.pending_bytes) == (False, 0)


class TestReload:
    def make(self):
        completion = make(DIAMOND, max_pending=PendingLimit(batches=9))
        completion.stage_batch(batch("one", 1, "A0:0-1", "B0:0-1"), 1.0)
        completion.stage_batch(batch("one", 2, "A0:1-2", "C0:0-1"), 1.0)
        completion.stage_batch(batch("one", 3, "A0:2-3", "B0:1-2"), 1.0)
        completion.stage_batch(batch("two", 1, "B0:0-2", "D0:0-2"), 1.0)
        completion.stage_batch(batch("three", 1, "B0:0-1"), 1.0)
        assert pending_at(completion) == {1: "four", 2: "three", 3: "three"}
        return completion

    def test_what_waits_at_stages_that_are_gone_fails(self):
        completion = self.make()
        update(completion, [DIAMOND[0], DIAMOND[1], DIAMOND[3]], TIMEOUT_MS, 2.0)
        assert sorted(told(completion)) == [
            ("one", 2, "failed", PIPELINE_CHANGED),
            ("one", 3, "failed", PIPELINE_CHANGED),
        ]
        completion.stage_batch(batch("four", 1, "D0:0-2"), 3.0)
        assert told(completion) == done(1)
        assert completion.ledger.pending_batches == 0

    def test_what_waits_for_topics_that_are_not_read_any_more_fails(self):
        completion = self.make()
        three = stage("three", "B", "E")
        update(completion, [stage("new", "A"), *DIAMOND[:2], three, DIAMOND[3]], 1e6, 2.0)
        assert told(completion) == [("one", 2, "failed", PIPELINE_CHANGED)]
        assert pending_at(completion) == {1: "four", 3: "three"}

    def test_the_same_again_changes_nothing(self):
        completion = self.make()
        completion.unwritten.take()
        update(completion, DIAMOND, TIMEOUT_MS, 2.0)
        assert told(completion) == []
        assert completion.unwritten.take() == ([], [])

    def test_early_batches_of_stages_that_are_gone_are_dropped(self):
        completion = self.make()
        completion.stage_batch(batch("two", 2, "B0:2-9"), 2.0)
        update(completion, [DIAMOND[0]], TIMEOUT_MS, 2.0)
        assert completion.dropped_batches == 1
        assert completion.ledger.pending_batches == 0
        assert (completion.edges.size, completion.edges.partitions) == (0, {})

    def test_what_cannot_be_changes_nothing(self):
        completion = self.make()
        before = snapshot(completion)
        with pytest.raises(ValueError, match="above 0"):
            update(completion, DIAMOND[:1], -1.0, 2.0)
        assert snapshot(completion) == before


def test_too_many_edges_fail_the_oldest_roots_and_never_silently():
    limit = 160
    completion = make(max_edges=limit)
    ended = []
    for number in range(200):
        completion.stage_batch(
            batch("one", number, f"A0:{number}-{number + 1}", f"B0:{number}-{number + 1}", number),
            float(number),
        )
        assert completion.edges.size <= limit
        ended += told(completion)
    assert ended == [("one", number, "failed", TOO_MANY_EDGES) for number in range(len(ended))]
    assert completion.ledger.pending_batches == 200 - len(ended) == completion.edges.size // 2
    assert 70 <= completion.ledger.pending_batches <= 80
    assert document_of(completion)["failed"] == {TOO_MANY_EDGES: len(ended)}
    assert "more than 160 edges" in completion.notes[-1][1]
    completion.stage_batch(batch("two", 1, "B0:0-200"), 1e3)
    assert told(completion) == done(*range(len(ended), 200))


def test_a_single_batch_with_too_many_edges_fails_too():
    completion = make(max_edges=10)
    outputs = " ".join(f"B{partition}:0-1" for partition in range(10))
    completion.stage_batch(batch("one", 1, "A0:0-1", outputs), 1.0)
    assert told(completion) == [("one", 1, "failed", TOO_MANY_EDGES)]
    assert completion.edges.size == 0


def test_edges_of_roots_that_timed_out_do_not_stay_for_ever():
    completion = make()
    for number in range(SWEEP_AT):
        completion.stage_batch(
            batch("one", number, f"A0:{number}-{number + 1}", f"B0:{number}-{number + 1}"), 1.0
        )
    completion.unwritten.take()
    completion.tick(1.0 + TIMEOUT_MS * BUCKETS)
    assert len(completion.ledger.take_ended()) == SWEEP_AT
    assert (completion.edges.size, completion.edges.anchors) == (0, {})
    records, deletes = completion.unwritten.take()
    assert records == []
    assert len(deletes) == 3 * SWEEP_AT  # a root, an anchor and an edge each


class Lineage:
    """A pipeline at work, with the lineage of every record; reports may come late."""

    def __init__(self, stages, random):
        self.stages = stages
        self.random = random
        self.now_ms = 0.0
        self.logs = defaultdict(list)
        self.read = defaultdict(int)
        self.roots = set()
        self.reports = {stage.name: deque() for stage in stages}
        self.batches = 0

    def append(self, topic, roots):
        partition = self.random.randrange(2)
        log = self.logs[topic, partition]
        start = len(log)
        log += [roots] * self.random.randint(1, 3)
        return TopicRange(topic, partition, start, len(log))

    def work(self, stage):
        """Run a batch of a stage; some other producers append meanwhile."""
        self.batches += 1
        started_ms, self.now_ms = self.now_ms, self.now_ms + self.random.randint(1, 9)
        inputs, roots = [], frozenset()
        for topic in stage.consumes:
            for partition in range(2):
                log, key = self.logs[topic, partition], (stage.name, topic, partition)
                start = self.read[key]
                end = self.random.randint(start, len(log))
                self.read[key] = end
                inputs.append(TopicRange(topic, partition, start, end))
                roots = roots.union(*log[start:end])
                if topic == "A" and start < end:
                    roots |= {(stage.name, self.batches)}
                    self.roots.add((stage.name, self.batches))
        outputs = []
        for topic in stage.produces:
            for _ in range(self.random.randint(0, 3)):
                foreign = self.random.random() < 0.3
                written = self.append(topic, frozenset() if foreign else roots)
                if not foreign:
                    outputs.append(written)
        self.now_ms += self.random.randint(0, 9)
        self.reports[stage.name].append(
            StageBatch(stage.name, self.batches, tuple(inputs), tuple(outputs), started_ms)
        )

    def finished(self):
        """Return the roots of which nothing waits."""
        waiting = set()
        for each in self.stages:
            for topic in each.consumes:
                for partition in range(2):
                    log = self.logs[topic, partition]
                    waiting.update(*log[self.read[each.name, topic, partition] :])
        return self.roots - waiting


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    stages=st.sampled_from([CHAIN, DIAMOND, JOIN]),
    steps=st.integers(1, 60),
    delay=st.sampled_from([0.0, 0.3, 0.7]),
    repeats=st.sampled_from([0.0, 0.2]),
)
def test_completes_just_what_the_lineage_of_each_record_says(seed, stages, steps, delay, repeats):
    random = Random(seed)
    lineage, completion, ended = Lineage(stages, random), make(stages), []

    def report(stage):
        one = lineage.reports[stage.name].popleft()
        completion.stage_batch(one, lineage.now_ms)
        if random.random() < repeats and "A" not in stage.consumes:  # else it is a new root
            completion.stage_batch(one, lineage.now_ms)

    def check():
        ended.extend(completion.ledger.take_ended())
        assert all(end.reason == "" for end in ended)
        owners = [(end.owner.stage, end.owner.batch) for end in ended]
        assert len(set(owners)) == len(owners)
        return set(owners)

    for _ in range(steps):
        if random.random() < 0.6:
            lineage.append("A", frozenset())
        lineage.work(random.choice(stages))
        for each in stages:
            while lineage.reports[each.name] and random.random() >= delay:
                report(each)
        told_so_far = check()
        assert told_so_far <= lineage.finished()
        if not delay and len(completion.early) == 0:
            assert told_so_far == lineage.finished()
    for each in stages:
        while lineage.reports[each.name]:
            report(each)
    lineage.now_ms += 1
    for each in stages:
        completion.idle(each.name, lineage.now_ms)
    assert check() == lineage.finished()
    assert completion.forced_batches == 0
    assert completion.ledger.pending_batches == len(lineage.roots - lineage.finished())
    completion.tick(lineage.now_ms + TIMEOUT_MS * BUCKETS)
    assert len(completion.ledger.roots) == 0


@pytest.mark.slow
def test_100_000_roots_of_any_size_take_at_most_64_mib():
    """Does to the ledger and the edges what batches of a first stage do, each of 1,000 records: for
    a quarter of them, as memory is watched slowly; tables are as full of either number.
    """
    roots, partitions = 25_000, 8
    ledger = Ledger(TIMEOUT_MS, Random(1), WallClockOffset(0.0), lambda *_: None)
    edges = PendingEdges(ledger.new_id, lambda *_: None)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(roots):
            root = ledger.new_root()
            key = ("two", "B", number % partitions)
            start = number * 1_000
            edge, _ = edges.produce(key, start, start + 1_000, edges.anchor((root,)))
            owner = SourceBatch("one", number, start)
            ledger.init(root, edge, owner, float(number), float(number))
        # A tree of any size: what is made and finished leaves nothing behind.
        for _ in range(1_000):
            made = ledger.new_id()
            ledger.ack(root, made, 0.0)
            ledger.ack(root, made, 0.0)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(ledger.roots) == roots
    assert edges.size == 2 * roots
    assert used <= 16 * MIB


def test_a_batch_in_pieces_is_one_edge():
    completion = make()
    pieces = " ".join(f"B0:{start}-{start + 1}" for start in range(1_000))
    completion.stage_batch(batch("one", 1, "A0:0-1", pieces), 1.0)
    for number in range(0, 999, 3):
        inputs, outputs = f"B0:{number}-{number + 3}", f"C0:{number}-{number + 3}"
        completion.stage_batch(batch("two", number, inputs, outputs), 2.0)
    assert completion.edges.size == 2 + 1  # what is left in B, and all of C: of one anchor
