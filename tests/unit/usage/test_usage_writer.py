"""What is not written yet: its numbers, how it is summed up, and what is lost."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.usage_world import open_writer, record
from structlog.testing import capture_logs

from proxy.state import StateError
from proxy.usage import usage_topic
from proxy.usage.usage_topic import FINE_MS, WRITTEN_TOGETHER

MINUTE_MS = 60_000


def all_of(writer):
    """Write everything; return what was written."""
    found = []
    while records := writer.take():
        found += [each.model_copy() for each in records]
        writer.written()
    return found


def coarsen(writer, now_ms):
    for _ in writer.coarsening(now_ms):
        pass


def lost(metrics):
    return metrics.get_sample_value("kafka_quota_proxy_usage_records_lost_total")


def test_records_are_numbered_in_their_order():
    writer, _ = open_writer()
    for number in range(2 * WRITTEN_TOGETHER + 1):
        writer.add(record(bytes=number))
    found = all_of(writer)
    assert [each.sequence for each in found] == list(range(2 * WRITTEN_TOGETHER + 1))
    assert [each.bytes for each in found] == list(range(2 * WRITTEN_TOGETHER + 1))


def test_what_is_old_is_summed_up_and_what_was_tried_is_not():
    writer, metrics = open_writer()
    writer.add(record(topic="tried"))
    tried = list(writer.take())
    for minute in range(30):
        end_ms = (minute + 1) * MINUTE_MS
        writer.add(record(start_ms=end_ms - MINUTE_MS, end_ms=end_ms, peak=float(minute)))
        coarsen(writer, end_ms)
    assert writer.take()[:1] == tried
    sequences = [each.sequence for each in writer.take()]
    one, whole, *fine = all_of(writer)
    assert (one.topic, one.sequence) == ("tried", 0)
    assert sequences == sorted(sequences)
    assert (whole.start_ms, whole.end_ms) == (0, 30 * MINUTE_MS - FINE_MS - MINUTE_MS)
    assert (whole.bytes, whole.rates, whole.peak) == (19 * 1000, {7: 38}, 18.0)
    assert len(fine) == FINE_MS // MINUTE_MS + 1
    assert lost(metrics) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdef"), st.sampled_from(["tick", "take", "write"])),
        max_size=60,
    ),
    st.integers(3, 20),
)
def test_without_doubles_it_is_all_and_a_gap_shows_what_is_lost(steps, room):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage_topic, "MAX_UNWRITTEN", room)
        patch.setattr(usage_topic, "WRITTEN_TOGETHER", 2)
        writer, metrics = open_writer()
        found, now_ms = [], 0
        for client_id, what in steps:
            now_ms += 4 * MINUTE_MS
            writer.add(record(client_id=client_id, end_ms=now_ms, start_ms=now_ms - 1))
            coarsen(writer, now_ms)
            assert writer.unwritten <= room
            if what != "tick":  # what is tried may be in the topic
                found += [each.model_copy() for each in writer.take()]
            if what == "write":
                writer.written()
        found += all_of(writer)
    once = {each.sequence: each for each in found}
    assert all(once[each.sequence] == each for each in found)  # doubles are the same
    if lost(metrics):
        writer.add(record())
        assert writer.take()[0].sequence == len(once) + lost(metrics)
    else:
        assert sum(each.bytes for each in once.values()) == 1000 * len(steps)


async def test_the_end_waits_for_a_while_only_and_says_what_is_lost(monkeypatch):
    monkeypatch.setattr(usage_topic, "CLOSE_LIMIT_S", 0.01)
    writer, metrics = open_writer()
    for _ in range(3):
        writer.add(record())
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            await writer.close()
    assert logs[-1] == {
        "event": "the last usage records are lost",
        "records": 3,
        "log_level": "error",
    }
    assert lost(metrics) == 3


async def test_answers_that_make_no_sense_end_neither_the_writing_nor_the_proxy(monkeypatch):
    monkeypatch.setattr(usage_topic, "RETRY_REFUSED_S", 0.01)
    writer, metrics = open_writer()
    tried: list[float] = []

    async def ensure(_: object, limit_s: float) -> None:
        tried.append(limit_s)
        (_,) = [limit_s] if len(tried) == 3 else []

    async def append(_: object, records: object) -> None:
        pass

    monkeypatch.setattr(usage_topic.UsageTopic, "ensure", ensure)
    monkeypatch.setattr(usage_topic.UsageTopic, "append", append)
    writer.add(record())
    with capture_logs() as logs:
        async with asyncio.timeout(20):
            await writer.close()
    assert [each["event"].partition(",")[0] for each in logs] == [
        "usage is not written",
        "usage is written again",
    ]
    assert (len(tried), lost(metrics)) == (3, 0)


async def test_a_topic_of_no_use_is_said_with_its_mend_once(monkeypatch):
    monkeypatch.setattr(usage_topic, "CLOSE_LIMIT_S", 0.01)
    writer, _ = open_writer()

    async def ensure(_: object, limit_s: float) -> None:
        raise StateError(f"it would lose usage within {limit_s} s", "set it")

    monkeypatch.setattr(usage_topic.UsageTopic, "ensure", ensure)
    writer.add(record())
    with capture_logs() as logs:
        await writer.close()
    assert (logs[0]["error"], logs[0]["fix"]) == ("it would lose usage within 20.0 s", "set it")
