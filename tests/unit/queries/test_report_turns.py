"""A report of many partitions is applied in slices, and look-ups see all of it or nothing."""

import asyncio

import pytest
from parts.lookups import LOOKUP_VERSION, lookup_answer, lookup_request
from parts.query_world import QueryWorld, configured
from parts.reports import ReportingDriver, batch_document, parsed, uuid

from proxy.pipeline.running import RunningPipelines
from proxy.progress.report import ReportRefused
from proxy.progress.report_turns import ReportScheduler
from proxy.progress.topics import TopicNames
from proxy.queries.following import APPLIED_WAIT_MS, FollowedClientServices
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, Rule
from proxy.relay.intercept_queue import InterceptQueue
from proxy.slices import TimeSlicer
from proxy.wire.apis import LIST_OFFSETS

PARTITIONS = 5
END = 100
RULE = Rule(
    client_id="orders", bounds={QuotaKind.CONSUMER_BYTE_RATE: 1e6}, adaptive=AdaptiveSettings()
)


class TurnsWorld(QueryWorld):
    """A query whose reports are applied one partition at a time, in turns."""

    def __init__(self, *rules):
        super().__init__(*rules)
        self.open_queries(configured("orders", "others"))
        pipelines = RunningPipelines(
            *((), self.registry, self.backpressure, self.quotas, self.instruments),
            on_change=lambda: None,
        )
        self.turns = ReportScheduler(TimeSlicer(0.0))
        following = FollowedClientServices(
            *(self.registry, self.backpressure, TopicNames(), self.quotas, pipelines, self.turns),
            InterceptQueue(lambda *_: None),
        )
        self.client = following.client(ClientIdentity("default", None, "orders"), 1)
        assert self.client.wants(LIST_OFFSETS, self.now_ms)
        self.driver = ReportingDriver("orders")
        self.batches = 0

    def hears_of_a_run(self):
        """Take the start of a run in, so that no look-up waits for that."""
        report = parsed(self.driver.document("started", trigger=None))
        work = self.turns.take(self.registry.accepting(report, self.now_ms, self.now_s))
        while advance(work):
            pass

    def begin(self, end=END, driver=None):
        """Begin to take a report of a batch in; return the work, of which nothing is done."""
        self.batches += 1
        ends = dict.fromkeys(range(PARTITIONS), end)
        batch = batch_document(self.batches, None, ends)
        report = parsed((driver or self.driver).document("progress", batch=batch))
        steps = self.registry.accepting(report, self.now_ms, self.now_s)
        return self.turns.take(steps)

    def completed(self):
        query = self.registry.query_of("orders")
        return [each.committed_to for each in query.partitions.values()]

    def lookup(self):
        return self.client.request(*lookup_request("orders"), self.now_ms)


def advance(work, slices=1):
    """Go on with a work for so many slices, or to its end; return whether there is more of it."""
    try:
        for _ in range(slices):
            work.send(None)
    except StopIteration:
        return False
    return True


def until_applied_in_part(world, work):
    while not world.turns.is_applying:
        assert advance(work)
    assert advance(work)
    assert 0 < len(list(filter(None, world.completed()))) < PARTITIONS


def test_it_is_checked_and_applied_in_slices():
    world = TurnsWorld()
    work = world.begin()
    seen = []
    while advance(work):
        seen.append((world.turns.is_applying, len(world.completed())))
    checked = [(False, 0)] * PARTITIONS
    assert seen == [*checked, *((True, number) for number in range(1, PARTITIONS))]
    assert not world.turns.is_applying
    assert world.completed() == [END] * PARTITIONS


def test_a_drivers_answer_waits_while_one_is_applied():
    world = TurnsWorld(RULE)
    world.hears_of_a_run()
    work = world.begin()
    lookup = world.lookup()
    advance(work)
    assert lookup.wait_ms(world.now_ms) == 0  # nothing is changed yet
    until_applied_in_part(world, work)
    assert lookup.wait_ms(world.now_ms) == APPLIED_WAIT_MS
    while advance(work):
        pass
    assert lookup.wait_ms(world.now_ms) == 0


@pytest.mark.parametrize("ask", ["answered", "waited"])
def test_where_it_cannot_wait_the_rest_is_applied_at_once(ask):
    world = TurnsWorld(RULE)
    work = world.begin()
    until_applied_in_part(world, work)
    lookup = world.lookup()
    if ask == "answered":
        lookup.response(LOOKUP_VERSION, lookup_answer(2 * END), world.now_ms)
    else:
        assert lookup.wait_ms(world.now_ms)
        assert lookup.wait_ms(world.now_ms + APPLIED_WAIT_MS - 1) == 1
        assert lookup.wait_ms(world.now_ms + APPLIED_WAIT_MS) == 0
    assert world.completed() == [END] * PARTITIONS
    assert not advance(work)


def test_who_sees_nothing_of_reports_waits_for_none():
    world = TurnsWorld()
    work = world.begin()
    until_applied_in_part(world, work)
    lookup = world.lookup()
    assert lookup.wait_ms(world.now_ms) == 0
    lookup.response(LOOKUP_VERSION, lookup_answer(2 * END), world.now_ms)
    assert world.turns.is_applying
    work.close()


def test_who_is_cancelled_leaves_nothing_applied_in_part():
    world = TurnsWorld()
    work = world.begin()
    until_applied_in_part(world, work)
    work.close()
    assert world.completed() == [END] * PARTITIONS


def test_who_is_cancelled_before_that_changes_nothing():
    world = TurnsWorld()
    work = world.begin()
    advance(work)
    work.close()
    assert world.completed() == []


def test_one_that_is_refused_changes_nothing():
    world = TurnsWorld()
    first = world.begin()
    while advance(first):
        pass
    work = world.begin(END - 1)
    with pytest.raises(ReportRefused):
        advance(work, 2 * PARTITIONS)
    assert not world.turns.is_applying
    assert world.completed() == [END] * PARTITIONS


def test_what_takes_the_room_meanwhile_is_left_out(monkeypatch):
    world = TurnsWorld()
    monkeypatch.setattr("proxy.progress.query.MAX_PARTITIONS", PARTITIONS)
    work = world.begin()
    until_applied_in_part(world, work)
    query = world.registry.query_of("orders")
    query.open("another", 0, world.now_ms)
    while advance(work):
        pass
    assert len(query.partitions) == PARTITIONS
    assert len(list(filter(None, world.completed()))) == PARTITIONS - 1
    assert query.run_batches == 1


async def test_reports_take_turns():
    world = TurnsWorld()
    other = ReportingDriver("others", query_id=uuid("others"), sender=uuid("others"))
    works = [world.begin(END), world.begin(driver=other), world.begin(2 * END)]
    order = []

    async def take(work):
        order.append((await work).query.name)

    await asyncio.gather(*map(take, works))
    assert order == ["orders", "others", "orders"]
    assert world.completed() == [2 * END] * PARTITIONS
