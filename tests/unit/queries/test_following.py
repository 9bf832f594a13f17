"""Whose messages are wanted, and what becomes of each request that is shown."""

from functools import partial
from struct import pack

import pytest
from parts.lookups import LOOKUP_VERSION, lookup_answer, lookup_request
from parts.query_world import QueryWorld, configured

from proxy.backpressure.driver_view import REPORT_WAIT_MS
from proxy.progress.report_turns import ReportScheduler
from proxy.progress.topics import TopicNames
from proxy.queries.following import SLICES_MS, FollowedClientServices
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, QuotaManagerSettings, Rule
from proxy.relay.intercept_queue import InterceptQueue
from proxy.relay.interceptor import INTERCEPTED_APIS
from proxy.slices import SLICE_S, TimeSlicer
from proxy.wire.apis import APIS, FETCH, LIST_OFFSETS, PRODUCE
from proxy.wire.frames import RequestHead
from proxy.wire.list_offsets import LATEST

NOW_MS = 1000.0
FETCH_VERSION = 11
PRODUCE_VERSION = 9
BOUND = 1e6

FETCHES = [FETCH, LIST_OFFSETS]


class Appends:
    """Pipelines that follow some clients and write down what they are shown."""

    def __init__(self, *clients):
        self.clients = clients
        self.generation = 0
        self.calls = []

    def follows(self, client_id):
        return client_id in self.clients

    def appended(self, client_id, topic, partition, start, end, now_ms):
        self.calls.append(("appended", client_id, topic, partition, start, end, now_ms))

    def plans(self, client_id, partitions, now_ms):
        self.calls.append(("plans", client_id, set(partitions), now_ms))

    def sent(self, client_id, count, records):
        self.calls.append(("sent", client_id, count, records))


class FollowingWorld(QueryWorld):
    """Queries and pipelines that follow clients, and clients under adaptive rules."""

    def __init__(self, *, queries=(), writers=(), adaptive=(), slice_s=SLICE_S):
        super().__init__(*map(bounded, adaptive))
        self.open_queries(configured(*queries))
        self.appends = Appends(*writers)
        self.unshown = InterceptQueue(lambda *_: None)
        names, turns = TopicNames(), ReportScheduler(TimeSlicer(slice_s))
        self.following = FollowedClientServices(
            *(self.registry, self.backpressure, names, self.quotas, self.appends, turns),
            self.unshown,
        )

    def client(self, client_id="c", node_id=1):
        return self.following.client(ClientIdentity("default", None, client_id), node_id)


def bounded(client_id):
    bounds = {QuotaKind.CONSUMER_BYTE_RATE: BOUND}
    return Rule(client_id=client_id, bounds=bounds, adaptive=AdaptiveSettings())


def wanted(client):
    return {key for key in INTERCEPTED_APIS if client.wants(key, NOW_MS)}


def shown(client, api_key, version, body):
    head = RequestHead(len(body), api_key, version, 1, "c", 0)
    return client.request(head, memoryview(body), NOW_MS)


def produce_body(*deltas):
    """Make a request with a batch for each partition, by how many records it claims but one."""
    batches = [pack(">qi4xb6xi34x", 0, 49, 2, delta) for delta in deltas]
    topic = APIS[PRODUCE].request.TopicProduceData
    parts = [topic.PartitionProduceData(index=n, records=r) for n, r in enumerate(batches)]
    message = APIS[PRODUCE].request(acks=1, topic_data=[topic(name="t", partition_data=parts)])
    return bytes(message.encode(version=PRODUCE_VERSION))


def produce_answer(*error_codes):
    topic = APIS[PRODUCE].response.TopicProduceResponse
    parts = [
        topic.PartitionProduceResponse(index=n, error_code=code, base_offset=-1 if code else 7)
        for n, code in enumerate(error_codes)
    ]
    topics = [topic(name="t", partition_responses=parts)]
    message = APIS[PRODUCE].response(version=PRODUCE_VERSION, responses=topics)
    message.with_header(correlation_id=1)
    return bytes(message.encode(header=True, framed=True))


def lookup(client, timestamp=LATEST):
    return client.request(*lookup_request("c", timestamp=timestamp), NOW_MS)


def fetch(client):
    body = pack(">iiiibii", -1, 500, 1, 1 << 20, 0, 0, -1) + bytes(4 + 4) + pack(">h", 0)
    return shown(client, FETCH, FETCH_VERSION, body)


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        pytest.param({}, [], id="nobody"),
        pytest.param({"queries": ["other"], "writers": ["other"]}, [], id="another client"),
        pytest.param({"queries": ["c"]}, FETCHES, id="of a query"),
        pytest.param({"adaptive": ["c"]}, FETCHES, id="under an adaptive rule"),
        pytest.param({"writers": ["c"]}, [PRODUCE], id="of a pipeline"),
        pytest.param({"queries": ["c"], "writers": ["c"]}, [PRODUCE, *FETCHES], id="of both"),
    ],
)
def test_what_is_wanted_of_a_client(world, expected):
    assert wanted(FollowingWorld(**world).client()) == set(expected)


def test_nothing_is_wanted_of_a_client_without_an_id():
    world = FollowingWorld(queries=["c"], writers=[None])
    assert wanted(world.client(None)) == set()


def test_a_client_is_followed_from_the_moment_that_something_names_it():
    world = FollowingWorld()
    client = world.client()
    assert wanted(client) == set()
    world.registry.follow("c")
    assert wanted(client) == set(FETCHES)
    world.appends.clients = ("c",)
    assert wanted(client) == set(FETCHES)  # nobody has said that it changed
    world.appends.generation += 1
    assert wanted(client) == INTERCEPTED_APIS


def test_a_rule_that_is_no_longer_adaptive_takes_the_pressure_away_and_back():
    world = FollowingWorld(queries=["c"], adaptive=["c"])
    client = world.client()
    wanted(client)
    reader, lookups, pressure = client.reader, client.lookups, client.pressure
    assert pressure is not None
    world.quotas.update(QuotaManagerSettings())
    assert wanted(client) == set(FETCHES)
    assert client.pressure is None
    assert (client.reader, client.lookups) == (reader, lookups)
    assert not len(pressure.clamp.connections)


def test_a_query_under_another_client_id_is_followed_no_more():
    world = FollowingWorld(queries=["c"])
    client = world.client()
    wanted(client)
    world.registry.update(configured("other"))
    assert wanted(client) == set()
    assert (client.reader, client.lookups) == (None, None)


def test_a_closed_connection_is_clamped_no_more():
    world = FollowingWorld(adaptive=["c"])
    client = world.client()
    wanted(client)
    connections = client.pressure.clamp.connections
    assert len(connections) == 1
    client.close()
    client.close()
    assert not len(connections)


def test_a_fetch_is_walked_and_the_rest_taken_whole():
    world = FollowingWorld(queries=["c"])
    client = world.client()
    wanted(client)
    assert not fetch(client).takes_whole
    assert lookup(client).takes_whole


def test_an_answer_to_a_look_up_is_planned_for_first():
    world = FollowingWorld(queries=["c"], writers=["c"])
    client = world.client()
    wanted(client)
    frame = lookup_answer(7)
    assert lookup(client).response(LOOKUP_VERSION, frame, NOW_MS) == frame
    assert world.appends.calls == [("plans", "c", {("t", 0)}, NOW_MS)]
    (query,) = world.registry.queries
    assert query.partitions["t", 0].log.high_watermark == 7


@pytest.mark.parametrize(
    ("writers", "timestamp", "fetches"),
    [
        pytest.param([], LATEST, False, id="of no pipeline"),
        pytest.param(["c"], 12345, False, id="of a time"),
        pytest.param(["c"], LATEST, True, id="of an executor"),
    ],
)
def test_other_look_ups_plan_nothing(writers, timestamp, fetches):
    world = FollowingWorld(queries=["c"], writers=writers)
    client = world.client()
    wanted(client)
    if fetches:
        fetch(client)
    lookup(client, timestamp).response(LOOKUP_VERSION, lookup_answer(7), NOW_MS)
    assert world.appends.calls == []


def test_a_pipeline_is_told_of_records_that_the_broker_has_taken_and_of_no_others():
    """Whoever uses a producer's client id may claim two thousand million in each partition."""
    world = FollowingWorld(writers=["c"])
    client = world.client()
    wanted(client)
    body = produce_body(2, 2**31 - 1, 4)
    seen = shown(client, PRODUCE, PRODUCE_VERSION, body)
    assert world.appends.calls == []
    frame = produce_answer(0, 3, 0)
    assert seen.response(PRODUCE_VERSION, frame, NOW_MS) == frame
    assert world.appends.calls == [
        ("appended", "c", "t", 0, 7, 10, NOW_MS),
        ("appended", "c", "t", 2, 7, 12, NOW_MS),
        ("sent", "c", len(body), 8),
    ]


def test_what_is_read_and_held_goes_to_the_pressure_of_now():
    world = FollowingWorld(queries=["c"], adaptive=["c"])
    client = world.client()
    client.gated(NOW_MS - 10, NOW_MS)  # before any request was shown
    assert client.pressure is not None
    seen = fetch(client)
    seen.measured(100)
    seen.held(NOW_MS, NOW_MS + 10)
    world.quotas.update(QuotaManagerSettings())
    wanted(client)
    seen.measured(100)  # nobody to record it
    seen.held(NOW_MS, NOW_MS + 10)
    client.gated(NOW_MS, NOW_MS + 10)


def test_a_driver_is_answered_when_all_that_was_fetched_is_known():
    world = FollowingWorld(adaptive=["c"], slice_s=0.0)
    shown = []
    for each in "by another connection", "by a third":
        world.unshown.add(NOW_MS, partial(shown.append, each))
    client = world.client()
    wanted(client)
    seen = lookup(client)
    for count in (1, 2):
        assert seen.wait_ms(NOW_MS) == SLICES_MS
        assert len(shown) == count
    assert seen.wait_ms(NOW_MS) == REPORT_WAIT_MS


def test_an_executor_is_answered_whatever_others_have_fetched():
    world = FollowingWorld(adaptive=["c"])
    shown = []
    world.unshown.add(NOW_MS, partial(shown.append, "by another connection"))
    client = world.client()
    wanted(client)
    fetch(client)
    assert lookup(client).wait_ms(NOW_MS) == 0
    assert not shown
