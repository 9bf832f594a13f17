"""A report of one partition passes few stations."""

import gc
import json
import sys
from dataclasses import replace

import pytest
from parts.member_world import Tier
from parts.query_world import learn_end
from parts.reports import ReportingDriver, batch_document, uuid

from proxy.progress.report import ALL_QUERIES
from proxy.relay.intercept_queue import InterceptQueue

BATCHES = 5


def calls_of(work) -> tuple[int, int]:
    """Return how many calls, in how many files, a coroutine takes that waits for nothing."""
    files = []

    def count(frame, event, _):
        if event == "call":
            files.append(frame.f_code.co_filename)

    gc.disable()  # what other tests left behind is not to be taken apart just now
    sys.setprofile(count)
    try:
        work.send(None)
    except StopIteration:
        return len(files), len(set(files))
    finally:
        sys.setprofile(None)
        gc.enable()
    raise AssertionError("it waits for something")


@pytest.mark.parametrize(
    ("name", "most_calls", "most_files"),
    [
        pytest.param("plain", 62, 15, id="without a rule"),
        pytest.param("lone", 124, 21, id="with an adaptive one"),
    ],
)
async def test_a_report_of_one_partition_takes_few_calls(name, most_calls, most_files):
    (member,) = Tier(members=1).members
    driver = ReportingDriver(name, query_id=uuid(name), run_id=uuid(f"r{name}"), sender=uuid(name))

    def report(event, **more):
        raw = json.dumps(driver.document(event, **more)).encode()
        return member.queries.accept(raw, ALL_QUERIES)

    await report("started", trigger={"kind": "processing_time", "interval_ms": 1000})
    member.fetch(name, "t", 10 * BATCHES)
    for number in range(BATCHES):
        learn_end(member.registry, "t", 0, 10 * BATCHES, 0.0)
        start = 10 * number
        batch = batch_document(number, start, start + 10, rows=10, took_ms=500)
        work = report("progress", batch=batch)
        if number < BATCHES - 1:
            await work
    calls, files = calls_of(work)
    assert calls <= most_calls
    assert files <= most_files


async def test_what_was_fetched_before_a_report_is_recorded_before_it():
    (member,) = Tier(members=1).members
    driver = ReportingDriver("q", query_id=uuid("q"), run_id=uuid("r"), sender=uuid("q"))
    unshown = InterceptQueue(lambda *_: None)
    member.queries.following = replace(member.queries.following, unshown=unshown)

    def report(event, **more):
        raw = json.dumps(driver.document(event, **more)).encode()
        return member.queries.accept(raw, ALL_QUERIES)

    await report("started")
    member.fetch("q", "t", 10)
    (progress,) = member.registry.query_of("q").partitions.values()
    assert progress.pending == []
    await report("progress", batch=batch_document(0, 0, 10))
    assert progress.fetched_from == 0
    assert (progress.committed_to, progress.pending) == (10, [])
