"""Requests of real clients go by the lane in the proxy as its users run it, with a rule."""

import json
import uuid
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from support.operating import running
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, api_versions, fetch, list_offsets, produce, records
from support.report_poster import ReportPoster
from support.scripted_broker import ScriptedBroker, body

from examples.devkit.broker import EmbeddedBroker
from proxy.relay.lane import Lane
from proxy.wire.apis import APIS, FETCH, LIST_OFFSETS, PRODUCE
from proxy.wire.frames import RequestHead
from proxy.wire.list_offsets import LATEST

COUNTED = """
import atexit, collections, json
from proxy.relay.requests import RequestFlow
from proxy.relay.responses import ResponseFlow
calls = collections.Counter()
def count(flow, name):
    called = getattr(flow, name)
    def counted(*arguments):
        calls[flow.__name__] += 1
        return called(*arguments)
    setattr(flow, name, counted)
count(RequestFlow, "_take")
count(ResponseFlow, "_take")
def write():
    with open({path!r}, "w") as file:
        json.dump(calls, file)
atexit.register(write)
"""
"""How often Python handles a request, and a response."""

REQUESTS = 100
"""Of each kind."""
OTHERS = 150
"""Requests at the most that Python handles, of more than 3 x REQUESTS: the first ones, what clients
find out, and those that did not come whole."""
BOUND = "10MiB"
"""Far above what is read and written, and far below what 50 MiB, a consumer's limit for a Fetch,
would need to be granted whole."""
FAR = "10GiB"
LARGE_BYTES = 1_000_000
FETCH_BYTES = 50 << 20
RULE = {"client-id": "*", "consumer_byte_rate": BOUND, "producer_byte_rate": BOUND}

needs_lane = pytest.mark.skipif(Lane is None, reason="there was no compiler")
NO_LANE = """
import sys
sys.modules["proxy.relay._lane"] = None
"""
"""As where it was not compiled."""

PROFILED = """
import atexit, collections, json, sys
from proxy.relay.frame_flow import FrameFlow
runs, calls, depth = collections.Counter(), 0, 0
def profile(frame, event, _):
    global calls, depth
    if event == "call" and (depth or frame.f_code is FrameFlow.run.__code__):
        depth += 1
        calls += 1
    elif event == "return" and depth:
        depth -= 1
        if not depth:
            flow = frame.f_locals["self"]
            if not flow.closed:
                runs[flow.about["client_id"], type(flow).__name__, calls] += 1
            calls = 0
def write():
    sys.setprofile(None)
    with open({path!r}, "w") as file:
        json.dump(list(runs.items()), file)
atexit.register(write)
sys.setprofile(profile)
"""
"""How many Python calls each turn of a flow takes, by its client and direction."""

TOPIC, TOPIC_ID = "t", uuid.UUID(int=1)
REQUESTS_OF = {
    "fetch": fetch(15, TOPIC, topic_id=TOPIC_ID, max_bytes=FETCH_BYTES),
    "produce": produce(9, TOPIC, b"record"),
    "lookup": list_offsets(TOPIC, LATEST),
}
"""Of each client, in the versions that Kafka's own clients use through the proxy."""

QUERY, LOOKUPS, MOST_CALLS_ANSWERED = "query", 3, 50
"""After the first look-up that follows a Fetch: with that, the lane's copies are read, too."""


@needs_lane
def test_requests_of_real_clients_go_by_the_lane(
    kafka: EmbeddedBroker, topic: Callable[..., str], tmp_path: Path
) -> None:
    rule = {"client-id": "c", "consumer_byte_rate": BOUND, "producer_byte_rate": BOUND}
    counted = tmp_path / "calls.json"
    process = ProxyProcess(
        config(kafka.bootstrap, rules=[rule]),
        tmp_path / "proxy",
        changes=COUNTED.format(path=str(counted)),
    )
    partition = TopicPartition(topic(1), 0, 0)
    with running(process) as proxy:
        _write(proxy, partition.topic)
        _read(proxy, partition)
    calls = json.loads(counted.read_text())
    assert calls["RequestFlow"] <= OTHERS


def _write(proxy: ProxyProcess, topic: str) -> None:
    producer = Producer({"bootstrap.servers": proxy.bootstrap, "client.id": "c", "linger.ms": 0})
    for _ in range(REQUESTS):
        producer.produce(topic, b"record", partition=0)
        assert producer.flush(30) == 0


def _read(proxy: ProxyProcess, partition: TopicPartition) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": proxy.bootstrap,
            "client.id": "c",
            "group.id": "g",
            "fetch.wait.max.ms": 5,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([partition])
    for _ in range(REQUESTS):
        (found,) = consumer.offsets_for_times([partition], timeout=30)
        assert found.offset == 0
    assert until(lambda: consumer.poll(1), "a record")
    until(
        lambda: proxy.metrics().value("requests_total", api="Fetch") >= REQUESTS,
        "fetches at the end of the log",
    )
    consumer.close()


@pytest.mark.parametrize(
    ("rules", "most_calls"),
    [
        pytest.param([], {"fetch": 52, "produce": 52, "lookup": 48}, id="unbounded"),
        pytest.param(
            [RULE],
            {"fetch": 52, "produce": 52, "lookup": 48},
            id="bounded",
        ),
    ],
)
def test_a_round_trip_takes_few_calls_without_the_lane(
    tmp_path: Path, rules: list[dict[str, Any]], most_calls: dict[str, int]
) -> None:
    runs = _profiled(tmp_path, rules, NO_LANE)
    usual = {key: counts.most_common(1)[0][0] for key, counts in runs.items()}
    found = {
        client_id: usual[client_id, "RequestFlow"] + usual[client_id, "ResponseFlow"]
        for client_id in REQUESTS_OF
    }
    assert all(found[each] <= most for each, most in most_calls.items()), found


@needs_lane
@pytest.mark.parametrize("rules", [[], [RULE]], ids=["unbounded", "bounded"])
def test_most_round_trips_take_no_call_with_the_lane(
    tmp_path: Path, rules: list[dict[str, Any]]
) -> None:
    runs = _profiled(tmp_path, rules, "")
    for client_id in REQUESTS_OF:
        for flow in ("RequestFlow", "ResponseFlow"):
            assert runs[client_id, flow].total() <= REQUESTS / 4, (client_id, flow)


@needs_lane
def test_large_responses_go_by_the_lane(tmp_path: Path) -> None:
    counted = tmp_path / "calls.json"
    with ScriptedBroker({FETCH: partial(_fetched, value=bytes(LARGE_BYTES))}) as broker:
        settings = config(broker.bootstrap, rules=[{"client-id": "*", "consumer_byte_rate": FAR}])
        changes = COUNTED.format(path=str(counted))
        with running(ProxyProcess(settings, tmp_path, changes=changes)) as proxy:
            with RawClient(proxy.bootstrap, "c") as client:
                for _ in range(REQUESTS):
                    client.ask(REQUESTS_OF["fetch"])
            assert proxy.metrics().value("bytes_total", api="Fetch") > REQUESTS * LARGE_BYTES
    calls = json.loads(counted.read_text())
    assert max(calls.values()) <= REQUESTS / 4, calls


@needs_lane
def test_a_look_up_that_is_answered_here_takes_few_calls(tmp_path: Path) -> None:
    counted = tmp_path / "calls.json"
    with ScriptedBroker({FETCH: _fetched, LIST_OFFSETS: _looked_up}) as broker:
        settings = config(broker.bootstrap, queries=[{"name": QUERY}])
        process = ProxyProcess(settings, tmp_path, changes=PROFILED.format(path=str(counted)))
        with running(process) as proxy:
            poster = ReportPoster(proxy, TOPIC, QUERY)
            trigger = {"kind": "processing_time", "interval_ms": 1000}
            assert poster.post(poster.event("started", trigger=trigger))[0] == HTTPStatus.OK
            with RawClient(proxy.bootstrap, QUERY) as client:
                for _ in range(REQUESTS):
                    client.ask(fetch(12, TOPIC))
                    for _ in range(LOOKUPS):
                        client.ask(REQUESTS_OF["lookup"])
    # Some came too late: the machine may be slow.
    assert broker.asked[QUERY, LIST_OFFSETS] < REQUESTS * LOOKUPS / 2
    turns = _turns(counted)[QUERY, "RequestFlow"]
    assert turns.most_common(1)[0][0] <= MOST_CALLS_ANSWERED, turns


def _profiled(
    tmp_path: Path, rules: list[dict[str, Any]], before: str
) -> dict[tuple[str, str], Counter[int]]:
    """Return for each client and direction how often Python had a turn of so many calls."""
    counted = tmp_path / "calls.json"
    answers = {FETCH: _fetched, PRODUCE: _produced, LIST_OFFSETS: _looked_up}
    with ScriptedBroker(answers) as broker:
        settings = config(broker.bootstrap, rules=rules, queries=[{"name": "another"}])
        changes = before + PROFILED.format(path=str(counted))
        process = ProxyProcess(settings, tmp_path, changes=changes)
        with running(process) as proxy:
            for client_id, request in REQUESTS_OF.items():
                with RawClient(proxy.bootstrap, client_id) as client:
                    client.ask(api_versions(3))
                    for _ in range(REQUESTS):
                        client.ask(request)
    return _turns(counted)


def _turns(counted: Path) -> dict[tuple[str, str], Counter[int]]:
    runs: dict[tuple[str, str], Counter[int]] = {}
    for (client_id, flow, calls), count in json.loads(counted.read_text()):
        runs.setdefault((client_id, flow), Counter())[calls] += count
    return runs


def _fetched(head: RequestHead, value: bytes = b"record") -> bytes:
    topic = APIS[FETCH].response.FetchableTopicResponse
    part = topic.PartitionData(partition_index=0, high_watermark=2, records=records(value))
    found = topic(topic=TOPIC, topic_id=TOPIC_ID, partitions=[part])
    return body(FETCH, head.api_version, responses=[found])


def _produced(head: RequestHead) -> bytes:
    topic = APIS[PRODUCE].response.TopicProduceResponse
    part = topic.PartitionProduceResponse(index=0, base_offset=1)
    return body(
        PRODUCE, head.api_version, responses=[topic(name=TOPIC, partition_responses=[part])]
    )


def _looked_up(head: RequestHead) -> bytes:
    topic = APIS[LIST_OFFSETS].response.ListOffsetsTopicResponse
    part = topic.ListOffsetsPartitionResponse(partition_index=0, offset=2)
    return body(LIST_OFFSETS, head.api_version, topics=[topic(name=TOPIC, partitions=[part])])
