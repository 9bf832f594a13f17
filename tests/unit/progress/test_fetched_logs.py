"""Which look-ups are answered from the latest Fetch response, and with what."""

import pytest

from proxy.progress.tracker import MAX_AGE_MS, FetchedLogOffsets
from proxy.wire.list_offsets import (
    EARLIEST,
    LATEST,
    READ_COMMITTED,
    READ_UNCOMMITTED,
    LookupRequest,
)

SENT_MS = 1000.0
START, STABLE, HIGH = 3, 70, 90
NOT_LEADER = 6
UNKNOWN_LEVEL = 7


def fetched(partition=0, **more):
    values = {
        "partition": partition,
        "error_code": 0,
        "high_watermark": HIGH,
        "last_stable_offset": STABLE,
        "log_start_offset": START,
        "records_bytes": 100,
        "end_offset": None,
    }
    return tuple((values | more).values())


def logs_of(*partitions, sent_ms=SENT_MS):
    logs = FetchedLogOffsets()
    logs.begin_response(sent_ms)
    for partition in partitions:
        logs.record("t", [partition])
    return logs


def ask(timestamps, level=READ_UNCOMMITTED):
    return LookupRequest(level, {("t", index): each for index, each in timestamps.items()})


@pytest.mark.parametrize(
    ("timestamp", "level", "offset"),
    [
        pytest.param(EARLIEST, READ_UNCOMMITTED, START, id="earliest"),
        pytest.param(EARLIEST, READ_COMMITTED, START, id="earliest, read committed"),
        pytest.param(LATEST, READ_UNCOMMITTED, HIGH, id="latest"),
        pytest.param(LATEST, READ_COMMITTED, STABLE, id="latest, read committed"),
        pytest.param(LATEST, UNKNOWN_LEVEL, None, id="an isolation level that is not known"),
        pytest.param(0, READ_UNCOMMITTED, None, id="a time"),
        pytest.param(-3, READ_UNCOMMITTED, None, id="the largest timestamp"),
        pytest.param(-4, READ_UNCOMMITTED, None, id="the earliest local offset"),
        pytest.param(-5, READ_UNCOMMITTED, None, id="the latest tiered offset"),
    ],
)
def test_what_is_answered(timestamp, level, offset):
    expected = None if offset is None else {("t", 0): offset}
    assert logs_of(fetched()).offsets(ask({0: timestamp}, level), SENT_MS) == expected


@pytest.mark.parametrize(
    "partition",
    [
        pytest.param(fetched(error_code=NOT_LEADER), id="an error"),
        pytest.param(fetched(records_bytes=0), id="no records"),
        pytest.param(fetched(records_bytes=-1), id="records that are null"),
        pytest.param(fetched(partition=1), id="another partition"),
        pytest.param(fetched(high_watermark=-1), id="no high watermark"),
    ],
)
def test_what_is_not_known(partition):
    assert logs_of(partition).offsets(ask({0: LATEST}), SENT_MS) is None


def test_old_responses_say_less():
    """Fetch below version 5 has no log starts, below 4 no last stable offsets."""
    logs = logs_of(fetched(log_start_offset=-1, last_stable_offset=-1))
    assert logs.offsets(ask({0: EARLIEST}), SENT_MS) is None
    assert logs.offsets(ask({0: LATEST}, READ_COMMITTED), SENT_MS) is None
    assert logs.offsets(ask({0: LATEST}), SENT_MS) == {("t", 0): HIGH}


def test_an_empty_log_begins_at_0():
    assert logs_of(fetched(log_start_offset=0)).offsets(ask({0: EARLIEST}), SENT_MS) == {
        ("t", 0): 0
    }


def test_all_partitions_or_none():
    logs = logs_of(fetched(), fetched(1, high_watermark=95))
    assert logs.offsets(ask({0: LATEST, 1: LATEST}), SENT_MS) == {("t", 0): HIGH, ("t", 1): 95}
    assert logs.offsets(ask({0: EARLIEST, 1: LATEST}), SENT_MS) == {("t", 0): START, ("t", 1): 95}
    assert logs.offsets(ask({0: LATEST, 2: LATEST}), SENT_MS) is None
    assert logs.offsets(ask({0: LATEST, 1: 12345}), SENT_MS) is None
    assert logs.offsets(ask({}), SENT_MS) is None


def test_the_age_counts_from_the_request():
    logs = logs_of(fetched())
    assert logs.offsets(ask({0: LATEST}), SENT_MS + MAX_AGE_MS) is not None
    assert logs.offsets(ask({0: LATEST}), SENT_MS + MAX_AGE_MS + 0.1) is None


@pytest.mark.parametrize(
    "later",
    [
        pytest.param([], id="one that leaves it out, or is an error as a whole"),
        pytest.param([fetched(error_code=NOT_LEADER)], id="an error"),
        pytest.param([fetched(records_bytes=0, high_watermark=95)], id="no records"),
        pytest.param([fetched(1)], id="another partition"),
    ],
)
def test_only_the_latest_response_counts(later):
    logs = logs_of(fetched())
    logs.begin_response(SENT_MS + 1)
    for partition in later:
        logs.record("t", [partition])
    assert logs.offsets(ask({0: LATEST}), SENT_MS + 1) is None
    logs.begin_response(SENT_MS + 2)
    logs.record("t", [fetched(high_watermark=99)])
    assert logs.offsets(ask({0: LATEST}), SENT_MS + 2) == {("t", 0): 99}


def test_nothing_is_known_before_the_first_response():
    assert FetchedLogOffsets().offsets(ask({0: LATEST}), 1.0) is None
