"""Reports as they come over HTTP: what is read, and what is refused with which reason."""

import json
from contextlib import suppress
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.progress.report import (
    MAX_ERROR_CHARS,
    MAX_INT64,
    MAX_NAME_CHARS,
    MAX_PARTITIONS,
    MAX_REPORT_BYTES,
    MAX_VALUES,
    BatchRange,
    RefusalReason,
    ReportRefused,
    parse_report,
)

SENDER, QUERY, RUN = "a" * 32, "00000000-0000-0000-0000-00000000000b", "c" * 32

REPORT = {
    "sender": SENDER,
    "number": 17,
    "event": "progress",
    "query_id": QUERY,
    "run_id": RUN,
    "name": "orders",
    "client_id": None,
    "age_ms": 12,
    "batch": {
        "batch_id": 5,
        "timestamp": "2026-01-02T03:04:05.678Z",
        "rows": 4,
        "durations_ms": {"triggerExecution": 1234},
        "sources": [
            {
                "description": "KafkaV2[Subscribe[t]]",
                "start": {"t": {"0": 5}},
                "end": {"t": {"0": 9}},
                "latest": {"t": {"0": 20}},
                "rows": 4,
            }
        ],
    },
    "error": None,
}
MISSING = object()


def changed(path, value):
    document = deepcopy(REPORT)
    *folders, last = path.split("/")
    place = document
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return document


def parse(document):
    return parse_report(json.dumps(document).encode())


def refusal(document) -> ReportRefused:
    with pytest.raises(ReportRefused) as caught:
        parse(document)
    assert caught.value.fix
    assert caught.value.status == caught.value.reason.status
    return caught.value


def test_a_report_is_read():
    report = parse(REPORT)
    assert (report.number, report.event, report.name, report.client_id, report.age_ms) == (
        17,
        "progress",
        "orders",
        None,
        12.0,
    )
    assert report.query_id == QUERY
    assert report.run_id == "cccccccc-cccc-cccc-cccc-cccccccccccc"
    assert report.batch.timestamp_ms == 1767323045678.0
    assert report.batch.durations_ms["triggerExecution"] == 1234
    assert report.batch.sources[0].end == {"t": {"0": 9}}


@pytest.mark.parametrize("event", ["started", "idle", "terminated"])
def test_events_without_a_batch(event):
    report = parse({**REPORT, "event": event, "batch": None})
    assert (report.event, report.batch) == (event, None)


RUNNING = {
    **{key: value for key, value in REPORT.items() if key not in ("number", "batch", "error")},
    "event": "running",
    "age_ms": 0,
    "last_batch_id": 5,
    "is_waiting": True,
    "trigger": {"kind": "processing_time", "interval_ms": 2000},
}


def test_a_sign_of_life():
    report = parse(RUNNING)
    assert (report.number, report.last_batch_id, report.is_waiting) == (None, 5, True)
    assert (report.trigger.kind, report.trigger.interval_ms) == ("processing_time", 2000.0)
    least = {**RUNNING, "last_batch_id": None, "is_waiting": None, "trigger": None}
    assert parse(least).trigger is None


def test_a_trigger_that_is_not_known_is_another_one():
    trigger = {"kind": "whenever", "interval_ms": 20}
    assert parse({**RUNNING, "trigger": trigger}).trigger.kind == "other"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"number": 5}, id="a number, though it is no event"),
        pytest.param({"event": "started"}, id="an event without a number"),
        pytest.param({"batch": REPORT["batch"]}, id="a batch"),
        pytest.param({"last_batch_id": -1}, id="no batch has this number"),
        pytest.param({"is_waiting": 1}, id="neither true nor false"),
        pytest.param({"trigger": {"kind": 5}}, id="a trigger by number"),
        pytest.param({"trigger": {"kind": "once", "interval_ms": -1}}, id="a negative interval"),
        pytest.param({"trigger": {"kind": "once", "interval_ms": 5e-324}}, id="next to nothing"),
        pytest.param({"trigger": "once"}, id="a trigger in words"),
    ],
)
def test_malformed_signs_of_life(changes):
    assert refusal({**RUNNING, **changes}).reason is RefusalReason.MALFORMED


def test_optional_keys_may_be_left_out_and_unknown_ones_are():
    document = {**REPORT, "event": "terminated", "more": {"x": 1}}
    for key in ("name", "client_id", "batch", "error"):
        del document[key]
    assert parse(document).error is None
    assert parse({**document, "error": "boom\n  at x"}).error == "boom\n  at x"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("sender", "x"),
        ("sender", 5),
        ("sender", MISSING),
        ("number", 0),
        ("number", -1),
        ("number", True),
        ("number", "17"),
        ("number", 17.0),
        ("number", None),
        ("number", MAX_INT64 + 1),
        ("event", "stopped"),
        ("event", None),
        ("query_id", "orders"),
        ("run_id", None),
        ("name", ""),
        ("name", "a\nb"),
        ("name", "\x1b[31m"),
        ("name", 7),
        ("name", "n" * (MAX_NAME_CHARS + 1)),
        ("client_id", "c" * (MAX_NAME_CHARS + 1)),
        ("age_ms", -1),
        ("age_ms", True),
        ("age_ms", float("nan")),
        ("age_ms", float("inf")),
        ("age_ms", 1e300),
        ("age_ms", "12"),
        ("batch", None),
        ("batch", []),
        ("batch/batch_id", True),
        ("batch/batch_id", MAX_INT64 + 1),
        ("batch/rows", 1.5),
        ("batch/rows", 10**400),
        ("batch/timestamp", "yesterday"),
        ("batch/timestamp", 1767323045678),
        ("batch/timestamp", "1767323045678"),
        ("batch/timestamp", "2026-01-02T03:04:05"),
        ("batch/durations_ms", {"triggerExecution": float("nan")}),
        ("batch/durations_ms", {str(n): 1 for n in range(101)}),
        ("batch/sources", {}),
        ("batch/sources", [None]),
        ("batch/sources/0/end", None),
        ("batch/sources/0/end", {"t": {"0": True}}),
        ("batch/sources/0/end", {"t": {"0": float("nan")}}),
        ("batch/sources/0/end", {"t": {"0": MAX_INT64 + 1}}),
        ("batch/sources/0/end", {"t": {"00": 9}}),
        ("batch/sources/0/end", {"t": {"+0": 9}}),
        ("batch/sources/0/end", {"t": {"-1": 9}}),
        ("batch/sources/0/end", {"t": {"٣": 9}}),
        ("batch/sources/0/end", {"t": {"2147483648": 9}}),
        ("batch/sources/0/end", {"t": {"9" * 5000: 9}}),
        ("batch/sources/0/end", {"a topic": {"0": 9}}),
        ("batch/sources/0/end", {"t" * 250: {"0": 9}}),
        ("batch/sources/0/end", {"t": {str(n): 9 for n in range(MAX_PARTITIONS + 1)}}),
        ("error", "only when terminated"),
    ],
)
def test_malformed(path, value):
    error = refusal(changed(path, value))
    assert error.reason is RefusalReason.MALFORMED
    assert len(error.message) < 500


def test_the_message_says_where():
    error = refusal(changed("batch/sources/0/end", {"t": {"0": True}}))
    assert error.message.startswith("batch.sources.0.end.t.0: ")


@pytest.mark.parametrize("end", [{"t": {"007": 9}}, {"a topic": {"0": 9}}])
def test_the_message_says_what_the_key_of_an_offset_is(end):
    message = refusal(changed("batch/sources/0/end", end)).message
    assert "is not the name of a topic, or not the number of a partition, given" in message


def test_a_batch_belongs_to_progress_only():
    assert refusal({**REPORT, "event": "idle"}).reason is RefusalReason.MALFORMED


def test_an_error_that_is_too_long():
    document = {**REPORT, "event": "terminated", "batch": None, "error": "x" * MAX_ERROR_CHARS}
    assert parse(document).error
    assert refusal({**document, "error": "x" * (MAX_ERROR_CHARS + 1)})


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("batch/rows", -1, "rows is -1"),
        ("batch/batch_id", -5, "batch_id is -5"),
        ("batch/durations_ms", {"triggerExecution": -1}, "durations_ms.triggerExecution"),
        ("batch/sources/0/rows", -1, "sources.0.rows"),
        ("batch/sources/0/start", {"t": {"0": -2}}, "sources.0.start.t.0"),
        ("batch/sources/0/end", {"t": {"0": -1}}, "sources.0.end.t.0"),
        ("batch/sources/0/latest", {"t": {"7": -1}}, "sources.0.latest.t.7"),
    ],
)
def test_figures_that_no_batch_can_have(path, value, named):
    error = refusal(changed(path, value))
    assert error.reason is RefusalReason.IMPOSSIBLE
    assert named in error.message


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b"\xff\xfe", id="not UTF-8"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"a":' * 100_000, id="deep objects"),
        pytest.param(b'{"sender":NaN}', id="NaN"),
        pytest.param(b'{"number":' + b"9" * 100_000 + b"}", id="long number"),
        pytest.param(b'{"name":"\\ud800"}', id="half a surrogate"),
        pytest.param(b" " * (MAX_REPORT_BYTES + 1), id="too long"),
    ],
)
def test_what_is_no_report(raw):
    with pytest.raises(ReportRefused) as caught:
        parse_report(raw)
    assert caught.value.reason is RefusalReason.MALFORMED
    assert len(caught.value.message) < 500


MANY = 9000
MISTAKES = {
    "an offset": ({"t": {str(n): 5 for n in range(MANY)} | {"7": "x"}}, "end.t.7"),
    "each offset": ({"t": {str(n): "x" for n in range(MANY)}}, "end.t.0"),
    "each partition": ({"t": {f"0{n}": 5 for n in range(MANY)}}, "end.t.00.[key]"),
    "each topic": ({f"t {n}": {"0": 5} for n in range(MANY)}, "end.t 0.[key]"),
    "no partitions": ({f"t{n}": None for n in range(MANY)}, "end.t0"),
}


@pytest.mark.parametrize(("end", "where"), MISTAKES.values(), ids=MISTAKES)
def test_the_first_of_many_mistakes_is_named(end, where):
    error = refusal(changed("batch/sources/0/end", end))
    assert error.message.startswith(f"batch.sources.0.{where}: ")


def test_a_mistake_before_the_offsets_is_named_first():
    report = changed("batch/sources/0/start", [])
    report["batch"]["sources"][0]["end"] = {"t": {"0": "x"}}
    assert refusal(report).message.startswith("batch.sources.0.start: ")


def test_what_is_left_out_of_a_long_mistake_is_marked():
    error = refusal(changed("batch/batch_id", [0] * MANY))
    assert error.message.endswith("0, 0,...")
    nested = []
    for _ in range(100):
        nested = [nested]
    assert refusal(changed("batch/batch_id", nested)).message.endswith("[[[...")


def test_a_report_of_too_many_values_is_not_read():
    error = refusal(REPORT | {"other": [0] * MAX_VALUES})
    assert "values; the most is" in error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
PATHS = st.sampled_from(
    [*REPORT, *(f"batch/{key}" for key in REPORT["batch"])]
    + [f"batch/sources/0/{key}" for key in REPORT["batch"]["sources"][0]]
)


@given(st.binary())
def test_bytes_are_read_or_refused(raw):
    with suppress(ReportRefused):
        parse_report(raw)


@given(PATHS, JSON)
def test_whatever_stands_in_a_field_it_is_read_or_refused(path, value):
    try:
        parse(changed(path, value))
    except ReportRefused as error:
        assert error.message.isprintable()  # noqa: PT017 - most values are refused, not all


# --- what several sources completed together


def source(end, start=None):
    return {"description": "k", "start": start, "end": end, "latest": None, "rows": 0}


@pytest.mark.parametrize(
    ("sources", "ranges"),
    [
        pytest.param([], {}, id="none"),
        pytest.param([source({"t": {"0": 9}})], {("t", 0): BatchRange(None, 9)}, id="first batch"),
        pytest.param(
            [source({"t": {"0": 9, "1": 4}}, {"t": {"0": 5}})],
            {("t", 0): BatchRange(5, 9), ("t", 1): BatchRange(None, 4)},
            id="a partition was added",
        ),
        pytest.param(
            [source({"t": {"0": 9}}, {"t": {"0": 5}}), source({"u": {"0": 2}}, {"u": {"0": 1}})],
            {("t", 0): BatchRange(5, 9), ("u", 0): BatchRange(1, 2)},
            id="two topics",
        ),
        pytest.param(
            [source({"t": {"0": 9}}, {"t": {"0": 5}}), source({"t": {"0": 7}}, {"t": {"0": 6}})],
            {("t", 0): BatchRange(5, 7)},
            id="one topic read twice: what both have",
        ),
        pytest.param(
            [source({"t": {"0": 9}}, {"t": {"0": 5}}), source({"t": {"0": 7}})],
            {("t", 0): BatchRange(None, 7)},
            id="one topic read twice, once from the beginning",
        ),
    ],
)
def test_what_a_batch_completed(sources, ranges):
    report = parse(changed("batch/sources", sources))
    assert report.batch.ranges == ranges


def test_the_ranges_of_batches_in_a_row_join_whichever_source_is_ahead():
    slow, fast = [0, 10, 30, 60], [0, 25, 40, 60]
    ranges = []
    for number in range(3):
        sources = [
            source({"t": {"0": read[number + 1]}}, {"t": {"0": read[number]}})
            for read in (slow, fast)
        ]
        ranges.append(parse(changed("batch/sources", sources)).batch.ranges["t", 0])
    assert ranges == [BatchRange(0, 10), BatchRange(10, 30), BatchRange(30, 60)]
