"""Whose look-ups the proxy answers: executors of streaming queries that live, and nobody else."""

import pytest
from parts.lookups import lookup_answer, lookup_request
from parts.query_world import QueryWorld, configured
from parts.reports import ReportingDriver, parsed, uuid

from proxy.pipeline.running import RunningPipelines
from proxy.progress.query import LIVE_MS
from proxy.progress.report_turns import ReportScheduler
from proxy.progress.topics import TopicNames
from proxy.progress.tracker import MAX_AGE_MS
from proxy.queries.following import FollowedClientServices
from proxy.quota.entities import ClientIdentity
from proxy.relay.intercept_queue import InterceptQueue
from proxy.slices import TimeSlicer
from proxy.wire.apis import APIS, FETCH, LIST_OFFSETS
from proxy.wire.frames import RequestHead
from proxy.wire.list_offsets import EARLIEST, LATEST

NAMED_FETCH, FETCH_BY_ID = 12, 17
TOPIC_ID = bytes(range(16))
START, HIGH = 3, 90


class AnsweringWorld(QueryWorld):
    """A followed query whose listener has reported its start, and its executors."""

    def __init__(self, *, reports="started", **settings):
        super().__init__()
        self.open_queries(configured("orders", **settings))
        self.names = TopicNames()
        pipelines = RunningPipelines(
            *((), self.registry, self.backpressure, self.quotas, self.instruments),
            on_change=lambda: None,
        )
        turns = ReportScheduler(TimeSlicer())
        self.following = FollowedClientServices(
            *(self.registry, self.backpressure, self.names, self.quotas, pipelines, turns),
            InterceptQueue(lambda *_: None),
        )
        self.driver = ReportingDriver("orders")
        if reports:
            self.report(reports)

    def report(self, event):
        self.accept_report(parsed(self.driver.document(event)))

    def client(self, client_id="orders"):
        client = self.following.client(ClientIdentity("default", None, client_id), 1)
        assert client.wants(FETCH, self.now_ms)
        return client

    def fetch(self, client, version=NAMED_FETCH):
        message = APIS[FETCH].request(
            replica_id=-1, max_wait_ms=500, min_bytes=1, session_id=0, session_epoch=0, topics=[]
        )
        body = bytes(message.encode(version=version))
        head = RequestHead(len(body), FETCH, version, 1, "orders", 0)
        seen = client.request(head, memoryview(body), self.now_ms)
        seen.sent()
        return seen

    def answer(self, seen, topic="t", **more):
        values = {
            "partition": 0,
            "error_code": 0,
            "high_watermark": HIGH,
            "last_stable_offset": HIGH,
            "log_start_offset": START,
            "records_bytes": 100,
            "end_offset": None,
        }
        observer = seen.observer(self.now_ms)
        observer.session(0, 5)
        observer.partitions(topic, [tuple((values | more).values())])
        observer.ended()

    def fetched(self, client, version=NAMED_FETCH, **answer):
        self.answer(self.fetch(client, version), **answer)

    def lookup(self, client, timestamp=LATEST, topic="t", number=7):
        request = lookup_request("orders", topic, timestamp, number)
        return client.request(*request, self.now_ms).answer


def answer(offset, number=7):
    return lookup_answer(offset, number=number)


def test_an_executor_after_each_fetch():
    world = AnsweringWorld()
    client = world.client()
    world.fetched(client)
    assert world.lookup(client, EARLIEST) == answer(START)
    assert world.lookup(client, LATEST, number=8) == answer(HIGH, 8)
    world.fetched(client, high_watermark=99)
    assert world.lookup(client, LATEST) == answer(99)


def test_while_the_next_fetch_is_in_flight():
    world = AnsweringWorld()
    client = world.client()
    world.fetched(client)
    following = world.fetch(client)
    assert world.lookup(client, EARLIEST) == answer(START)
    world.answer(following, records_bytes=0)
    assert world.lookup(client, LATEST) is None


def test_a_topic_by_id_once_its_name_is_known():
    world = AnsweringWorld()
    client = world.client()
    world.fetched(client, FETCH_BY_ID, topic=TOPIC_ID)
    assert world.lookup(client) is None
    world.names.resolved({TOPIC_ID: "t"})
    world.fetched(client, FETCH_BY_ID, topic=TOPIC_ID)
    assert world.lookup(client) == answer(HIGH)


def test_old_figures_are_not_told_again():
    world = AnsweringWorld()
    client = world.client()
    seen = world.fetch(client)
    world.now_ms += MAX_AGE_MS + 1  # the broker took its time, or a quota held the response
    world.answer(seen)
    assert world.lookup(client) is None
    world.fetched(client)
    assert world.lookup(client) == answer(HIGH)
    world.now_ms += MAX_AGE_MS + 1
    assert world.lookup(client) is None


def test_another_connection_of_the_client():
    """As the driver's: it fetches nothing, whatever executors were given."""
    world = AnsweringWorld()
    executor, driver = world.client(), world.client()
    world.fetched(executor)
    assert world.lookup(driver) is None


def test_a_connection_that_looks_up_before_it_fetches():
    """As of a batch query, which may read with the client id while the streaming query lives."""
    world = AnsweringWorld()
    client = world.client()
    assert world.lookup(client) is None
    world.fetched(client)
    assert world.lookup(client) is None


def test_a_connection_whose_first_look_ups_were_not_shown():
    world = AnsweringWorld()
    client = world.following.client(ClientIdentity("default", None, "later"), 1)
    assert not client.wants(LIST_OFFSETS, world.now_ms)
    world.driver = ReportingDriver("later", sender=uuid("later"), query_id=uuid("later"))
    world.report("started")
    assert client.wants(FETCH, world.now_ms)
    world.fetched(client)
    assert world.lookup(client) is None
    other = world.client("later")
    world.fetched(other)
    assert world.lookup(other) == answer(HIGH)


@pytest.mark.parametrize(
    "world",
    [
        pytest.param({"reports": None}, id="nothing says that it is a streaming query"),
        pytest.param({"reports": "terminated"}, id="its run has ended"),
        pytest.param({"answers_lookups": False}, id="switched off"),
    ],
)
def test_none_is_answered(world):
    opened = AnsweringWorld(**world)
    client = opened.client()
    opened.fetched(client)
    assert opened.lookup(client) is None


def test_a_listener_that_is_silent_ends_it_and_one_that_is_back_begins_it_again():
    world = AnsweringWorld()
    client = world.client()
    world.now_ms += LIVE_MS
    world.fetched(client)
    assert world.lookup(client) is None
    world.report("idle")
    assert world.lookup(client) is None  # what was fetched before is not known
    world.fetched(client)
    assert world.lookup(client) == answer(HIGH)


def test_a_change_of_the_configuration_is_in_force_at_once():
    world = AnsweringWorld()
    client = world.client()
    world.fetched(client)
    world.registry.update(configured("orders", answers_lookups=False))
    assert world.lookup(client) is None
    world.registry.update(configured("orders"))
    assert world.lookup(client) == answer(HIGH)


def test_another_query_takes_over_the_client_id():
    world = AnsweringWorld()
    client = world.client()
    world.fetched(client)
    world.registry.update(configured("other"))
    world.registry.forget(world.registry.query_of("orders"))
    world.registry.update(configured("orders"))
    world.driver = ReportingDriver("orders", query_id=uuid("another"), sender=uuid("another"))
    world.report("started")
    assert client.wants(LIST_OFFSETS, world.now_ms)
    assert world.lookup(client) is None
