import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_parts import graph, snapshot, stage

from proxy.admin.document_models import RowContext
from proxy.admin.pipeline_documents import COMPLETION
from proxy.pipeline.completion import PIPELINE_CHANGED, CompletionTracker, StageBatch
from proxy.pipeline.ledger import TopicRange
from proxy.state import MemoryStore, Record, UnwrittenRecords

TIMEOUT_MS = 1_000.0
START_S = 1_700_000_000.0
PREFIX = "ledger/p%2F%C3%A4/"


STAGES = (
    stage("one", "A", "B C"),
    stage("two/x", "B", "D"),
    stage("three", "B C", "E"),
    stage("four", "D E A"),
)


def make(random, now_ms=0.0, started_ms=0.0, stages=STAGES):
    """Make one whose monotonic clock began at `started_ms` of the test's time."""
    return CompletionTracker(
        graph(stages, "p/ä", timeout_ms=TIMEOUT_MS),
        UnwrittenRecords(),
        random=random,
        now_ms=now_ms - started_ms,
        now_s=START_S + now_ms / 1000,
    )


def spans(topics):
    return st.lists(
        st.builds(
            lambda topic, partition, start, size: TopicRange(topic, partition, start, start + size),
            st.sampled_from(topics),
            st.integers(0, 1),
            st.integers(0, 30),
            st.integers(0, 10),
        ),
        max_size=3,
    ).map(tuple)


def steps():
    batches = [
        st.tuples(
            st.just("batch"),
            st.builds(
                StageBatch,
                st.just(stage.name),
                st.integers(1, 9),
                spans(stage.consumes),
                spans(stage.produces) if stage.produces else st.just(()),
                st.integers(0, 50).map(float),
                st.integers(0, 100),
            ),
        )
        for stage in STAGES
    ]
    idle = st.tuples(st.just("idle"), st.sampled_from([stage.name for stage in STAGES]))
    others = [idle, st.just(("tick", None)), st.just(("fail", None)), st.just(("restart", None))]
    return st.lists(st.tuples(st.one_of(*batches, *others), st.integers(0, 300)), max_size=40)


def written(records):
    return {record.key: record for record in records}


def stored(store):
    return written(store.items(PREFIX))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps())
def test_goes_on_from_its_records_as_if_nothing_had_happened(history):
    """One is never restarted; the other one is, on a monotonic clock that begins anew."""
    now_ms, started_ms = 0.0, 0.0
    steady, restarted = make(Random(1)), make(random := Random(1))
    store = MemoryStore()
    for (kind, what), pause_ms in [*history, (("tick", None), 10 * TIMEOUT_MS)]:
        now_ms += pause_ms
        if kind == "restart":
            started_ms = now_ms - 17.0
            restarted = make(random, now_ms, started_ms)
            assert restarted.load(store.items(PREFIX), now_ms - started_ms) == []
        for one, began_ms in ((steady, 0.0), (restarted, started_ms)):
            at_ms = now_ms - began_ms
            if kind == "batch":
                began = StageBatch(
                    *(what.stage, what.batch, what.inputs, what.outputs),
                    *(at_ms - what.started_ms, what.size_bytes),
                )
                one.stage_batch(began, at_ms)
            elif kind == "idle":
                one.idle(what, at_ms)
            elif kind == "fail":
                for root in sorted(one.ledger.roots.keys())[:1]:
                    one.ledger.fail(root, "error", at_ms)
            else:
                one.tick(at_ms)
        records, deletes = restarted.unwritten.take()
        store.put_many(records, delete=deletes)
        assert stored(store) == written(snapshot(restarted))
        expected = [
            (end.root, end.owner, end.started_ms, end.ended_ms, end.reason)
            for end in steady.ledger.take_ended()
        ]
        assert [
            (
                *(end.root, end.owner),
                *(end.started_ms + started_ms, end.ended_ms + started_ms),
                end.reason,
            )
            for end in restarted.ledger.take_ended()
        ] == expected
        assert restarted.ledger.roots.keys() == steady.ledger.roots.keys()
        for name in ("pending_batches", "pending_bytes"):
            assert getattr(restarted.ledger, name) == getattr(steady.ledger, name)
        roots = steady.ledger.roots.keys()
        assert restarted.waits_at(roots) == steady.waits_at(roots)
        assert steady.waits_at(roots).keys() == roots  # what waits is in the edges


def busy():
    """Return one with something of each kind."""
    completion = make(Random(1))
    read = (TopicRange("A", 0, 0, 5),)
    wrote = (TopicRange("B", 0, 0, 5), TopicRange("C", 0, 0, 5))
    completion.stage_batch(StageBatch("one", 1, read, wrote, 1.0), 2.0)
    read, wrote = (TopicRange("B", 0, 0, 3),), (TopicRange("D", 0, 0, 3),)
    completion.stage_batch(StageBatch("two/x", 1, read, wrote, 2.0), 3.0)
    completion.stage_batch(StageBatch("two/x", 2, (TopicRange("B", 0, 5, 9),), (), 3.0), 4.0)
    return completion


def test_writes_what_changed_and_no_more():
    completion = busy()
    records, deletes = completion.unwritten.take()
    assert written(records) == written(snapshot(completion))
    kinds = {record.key.removeprefix(PREFIX).split("/")[0] for record in records}
    assert kinds == {"root", "group", "edge", "lane", "stage", "early"}
    assert completion.unwritten.take() == ([], [])
    completion.stage_batch(StageBatch("four", 1, (TopicRange("D", 0, 0, 2),), (), 5.0), 6.0)
    records, deletes = completion.unwritten.take()
    names = sorted(record.key.removeprefix(PREFIX) for record in records)
    assert [name.split("/")[0] for name in names] == ["edge", "lane", "root", "stage"]
    assert [key.removeprefix(PREFIX) for key in deletes] == ["edge/four/D/0/0"]


def test_what_was_taken_up_is_not_written_again():
    completion = make(Random(2), now_ms=10.0)
    assert completion.load(snapshot(busy()), 10.0) == []
    assert completion.unwritten.take() == ([], [])


EARLIER = {
    "early/3": {
        "stage": "two/x",
        "batch": 2,
        "inputs": [{"topic": "B", "partition": 0, "start": 5, "end": 9}],
        "outputs": [],
        "started_s": 1700000000.003,
        "at_s": 1700000000.004,
        "size_bytes": 0,
    },
    "edge/four/D/0/0": {"end": 3, "id": "78e510617311d8a3", "group": 1},
    "edge/three/B/0/0": {"end": 5, "id": "1027c4d1c386bbc4", "group": 1},
    "edge/three/C/0/0": {"end": 5, "id": "1e2feb89414c343c", "group": 1},
    "edge/two%2Fx/B/0/3": {"end": 5, "id": "c2ce6f447ed4d57b", "group": 1},
    "group/1": {"roots": ["91b7584a2265b1f5"]},
    "lane/four/D/0": {"known_to": 3, "done": []},
    "lane/three/B/0": {"known_to": 5, "done": []},
    "lane/three/C/0": {"known_to": 5, "done": []},
    "lane/two%2Fx/B/0": {"known_to": 5, "done": [[0, 3]]},
    "root/91b7584a2265b1f5": {
        "at": {
            "two/x": "c2ce6f447ed4d57b",
            "three": "0e082f5882ca8ff8",
            "four": "78e510617311d8a3",
        },
        "owner": {"stage": "one", "batch": 1, "size_bytes": 0},
        "started_s": 1700000000.001,
        "heard_s": 1700000000.25,
        "failed": None,
    },
    "stage/one": {"settled_s": 1700000000.001},
    "stage/two%2Fx": {"settled_s": 1700000000.002},
}
"""What an earlier program wrote, which kept a value for each stage: that of `busy`."""


def test_what_an_earlier_program_wrote_is_taken_up_and_ends_as_it_would_have():
    records = [Record.of(PREFIX + name, value) for name, value in EARLIER.items()]
    completion = make(Random(2), now_ms=5.0)
    assert completion.load(records, 5.0) == []
    assert completion.unwritten.take() == ([], [])
    kept = written(snapshot(completion))
    (root,) = [key for key in kept if key.startswith(f"{PREFIX}root/")]
    assert kept[root].value == EARLIER[root.removeprefix(PREFIX)] | {
        "at": {"one": "b423507d8f0f8220"}
    }
    del kept[root]
    assert kept == {each.key: each for each in records if each.key != root}
    assert list(completion.waits_at(completion.ledger.roots.keys()).values()) == ["two/x"]
    batches = [
        ("one", (TopicRange("A", 0, 5, 6),), (TopicRange("B", 0, 5, 9),)),
        ("two/x", (TopicRange("B", 0, 3, 5),), ()),
        ("three", (TopicRange("B", 0, 0, 9), TopicRange("C", 0, 0, 5)), ()),
        ("four", (TopicRange("D", 0, 0, 3),), ()),
    ]
    for stage_name, read, wrote in batches:
        completion.stage_batch(StageBatch(stage_name, 3, read, wrote, 6.0), 7.0)
    ended = [(end.owner.batch, end.reason) for end in completion.ledger.take_ended()]
    assert ended == [(3, ""), (1, "")]


def test_keys_are_in_the_namespace_and_quoted():
    keys = {record.key for record in snapshot(busy())}
    assert all(key.startswith(PREFIX) for key in keys)
    assert "ledger/p%2F%C3%A4/edge/two%2Fx/B/0/3" in keys


DAMAGED = [
    # kind, what its value becomes, what is said
    pytest.param("root", {"at": 1}, "at:", id="a root of another form"),
    pytest.param("root", {"started_s": "soon"}, "started_s:", id="a time that is none"),
    pytest.param("root", {"at": {"one": "0"}}, "an id is 0", id="an id of 0"),
    pytest.param("root", {"at": {"one": "0x5"}}, "at.one:", id="an id that is none"),
    pytest.param("root", {"more": 1}, "more:", id="a field too many"),
    pytest.param("group", {"roots": [5]}, "roots.0:", id="a group of another form"),
    pytest.param("edge", {"end": 0}, "it is empty", id="an edge without offsets"),
    pytest.param("edge", {"group": 99}, "its group is missing", id="an edge of no group"),
    pytest.param("edge", {"end": True}, "end:", id="a flag for a number"),
    pytest.param("lane", {"done": [[1]]}, "done.0:", id="a range of one offset"),
    pytest.param("stage", {"settled_s": None}, "settled_s:", id="no time"),
    pytest.param("early", {"stage": "gone"}, "not in the pipeline", id="a stage that is gone"),
    pytest.param("early", {"inputs": [{}]}, "inputs.0.topic:", id="a range of nothing"),
]


@pytest.mark.parametrize(("kind", "change", "text"), DAMAGED)
def test_damaged_records_are_refused_and_deleted_and_the_others_kept(kind, change, text):
    completion = busy()
    records = {record.key: record for record in snapshot(completion)}
    key = next(key for key in records if key.startswith(f"{PREFIX}{kind}/"))
    records[key] = Record.of(key, records[key].value | change)
    again = make(Random(2), now_ms=10.0)
    refused = again.load(records.values(), 10.0)
    assert refused[0].startswith(f"{key}: ")
    assert text in refused[0]
    assert key in again.unwritten.take()[1]
    again.tick(10.0 + 3 * TIMEOUT_MS)  # nothing stays for ever
    assert len(again.ledger.roots) == again.ledger.pending_batches == 0


@pytest.mark.parametrize(
    "name", ["", "/other/1", "/root", "/root/xyz", "/edge/a/b/c/d", "/lane/a/b"]
)
def test_keys_of_another_form_are_refused(name):
    completion = make(Random(1))
    key = PREFIX.removesuffix("/") + name
    (message,) = completion.load([Record.of(key, {"known_to": 1, "done": []})], 0.0)
    assert message.startswith(f"{key}: ")
    assert completion.unwritten.take() == ([], [key])


def test_text_that_is_no_json_is_refused():
    completion = make(Random(1))
    key = PREFIX + "root/00000000000000aa"
    (message,) = completion.load([Record(key, "{", 1)], 0.0)
    assert "JSON" in message
    assert completion.unwritten.take() == ([], [key])


def test_records_of_a_newer_program_are_left_alone():
    newer = [Record(record.key, record.text, 2) for record in snapshot(busy())]
    completion = make(Random(1))
    assert len(completion.load(newer, 0.0)) == len(newer)
    assert completion.unwritten.take() == ([], [])


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param((STAGES[0], STAGES[2], STAGES[3]), id="a stage is gone"),
        pytest.param(
            (STAGES[0], stage("two/x", "C", "D"), *STAGES[2:]), id="it reads another topic"
        ),
    ],
)
def test_a_pipeline_that_changed_meanwhile_fails_what_waited_there(stages):
    completion = make(Random(2), now_ms=10.0, stages=stages)
    completion.load(snapshot(busy()), 10.0)
    (end,) = completion.ledger.take_ended()
    assert (end.owner.batch, end.reason) == (1, PIPELINE_CHANGED)
    assert completion.ledger.pending_batches == 0


def test_the_time_while_it_was_away_counts():
    records = snapshot(busy())
    completion = make(Random(2), now_ms=5 * TIMEOUT_MS)
    completion.load(records, 5 * TIMEOUT_MS)
    completion.tick(5 * TIMEOUT_MS)
    assert [end.reason for end in completion.ledger.take_ended()] == ["timed_out"]


def test_the_document_is_json():
    document = json.loads(
        json.dumps(COMPLETION.document(busy(), RowContext(0.0, 7.0)), allow_nan=False)
    )
    (one,) = document["pending"]["first"]
    assert (one["waits_at"], one["stage"], one["batch"]) == ("two/x", "one", 1)
    assert one["age_s"] == pytest.approx(0.006, abs=1e-4)
    assert document["early_batches"] == 1
