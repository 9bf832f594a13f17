"""A broker that lies about lengths and counts harms nobody but the client that asked it, and one
that answers the proxy itself with nonsense does not end it.
"""

import asyncio
import gzip
from http.client import OK
from pathlib import Path
from struct import pack

import psutil
import pytest
from aiokafka.record.util import calc_crc32c
from kafka.protocol.api_key import ApiKey
from support.operating import quota_proxy, running
from support.proxy_process import ProxyProcess, config, until
from support.raw import RawClient, api_versions, fetch, message, records
from support.report_poster import ReportPoster
from support.scripted_broker import Answer, ScriptedBroker, body

from proxy.cluster.broker_connection import CLIENT_ID
from proxy.cluster.kafka_client import Bootstrap, KafkaClient
from proxy.cluster.upstream import UpstreamError
from proxy.relay.steering import MemberAddresses
from proxy.tier.group.group_documents import Subscription
from proxy.tier.group.group_member import GroupMember
from proxy.tier.group.slot_states import SlotStates
from proxy.wire.apis import (
    APIS,
    DESCRIBE_CONFIGS,
    FETCH,
    FIND_COORDINATOR,
    JOIN_GROUP,
    LIST_OFFSETS,
    METADATA,
    RESPONSE_HEADER_BYTES,
)
from proxy.wire.frames import RequestHead

QUERY, TOPIC = "query", "t"
UNTAGGED = 11
"""A version of Fetch in which an aborted transaction has no tagged fields."""
MOST = 2**31 - 1
GOOD_FETCHES = 50
"""More than the proxy takes to know what is alike in them."""
NO_LENGTH = pack(">i", -12)
"""Of a record batch that is, with what its length does not count, 0 bytes long."""
LENGTH_AT = 8
COORDINATORS = 200_000
MOST_GROWTH = 5
"""Times the response: it is kept once, and once more while it is rewritten."""


def test_a_count_that_is_a_lie_holds_nobody_up(tmp_path: Path) -> None:
    one_partition = pack(">ih", 1, 1) + b"t" + pack(">iihqqq", 1, 0, 0, 9, 9, 0)
    lie = bytes(10) + one_partition + pack(">i", MOST - 1000)  # so many aborted transactions
    with (
        ScriptedBroker({FETCH: lambda _: lie}, claims={FETCH: MOST}) as broker,
        running(_following(broker, tmp_path)) as proxy,
        RawClient(proxy.bootstrap, "other") as other,
        RawClient(proxy.bootstrap, QUERY) as client,
    ):
        client.send(fetch(UNTAGGED, TOPIC))
        client.read(RESPONSE_HEADER_BYTES + len(lie))  # it had them before they were read
        other.ask(api_versions(3))
        assert client.is_closed_by_peer()
        proxy.until_counts("upstream_errors_total", 1, reason="bad_response")


@pytest.mark.parametrize("version", [UNTAGGED, 12])
def test_a_batch_without_length_holds_nobody_up(tmp_path: Path, version: int) -> None:
    """Also where the Fetches before it went by the lane, and all were alike."""
    good = records(b"record")
    bad = good[:LENGTH_AT] + NO_LENGTH + good[LENGTH_AT + len(NO_LENGTH) :]
    sent = [good]

    def fetched(head: RequestHead) -> bytes:
        topic = APIS[FETCH].response.FetchableTopicResponse
        part = topic.PartitionData(partition_index=0, high_watermark=2, records=sent[-1])
        return body(FETCH, head.api_version, responses=[topic(topic=TOPIC, partitions=[part])])

    with (
        ScriptedBroker({FETCH: fetched}) as broker,
        running(_following(broker, tmp_path)) as proxy,
        RawClient(proxy.bootstrap, "other") as other,
        RawClient(proxy.bootstrap, QUERY) as client,
    ):
        for _ in range(GOOD_FETCHES):
            client.ask(fetch(version, TOPIC))
        sent.append(bad)
        client.send(fetch(version, TOPIC))
        assert bad in client.receive_frame()
        other.ask(api_versions(3))


def test_what_names_very_many_brokers_takes_little_more_than_its_length(tmp_path: Path) -> None:
    element = APIS[FIND_COORDINATOR].response.Coordinator
    content = body(
        FIND_COORDINATOR,
        4,
        coordinators=[element(key="g", node_id=1, host="h", port=9)] * COORDINATORS,
    )
    with (
        ScriptedBroker({FIND_COORDINATOR: lambda _: content}) as broker,
        running(ProxyProcess(config(broker.bootstrap), tmp_path, anew=True)) as proxy,
        RawClient(proxy.bootstrap, "client") as client,
    ):
        client.ask(api_versions(3))
        before = psutil.Process(proxy.pid).memory_info().rss
        client.send(message(FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["g"]))
        assert len(client.receive_frame()) > len(content)
        status = Path(f"/proc/{proxy.pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) << 10
    assert peak - before < MOST_GROWTH * len(content)


NULLS = b"\xff" * 64
"""Of a response: each list and each string is null, each number -1."""
TRIES, TRIES_LIMIT_S = 3, 30.0


@pytest.mark.parametrize("api_key", [METADATA, LIST_OFFSETS, int(ApiKey.OffsetCommit)])
def test_an_answer_without_its_lists_ends_nothing(tmp_path: Path, api_key: int) -> None:
    with ScriptedBroker({}) as broker:
        broker.answers.update(_cluster_of(broker))
        honest = broker.answers[api_key]
        broker.answers[api_key] = lambda head: (
            NULLS if head.client_id == CLIENT_ID else honest(head)
        )
        query = {"name": QUERY, "commit_group": "group"}
        settings = config(broker.bootstrap, queries=[query], limits={"drain_timeout": "1s"})
        with (
            running(ProxyProcess(settings, tmp_path)) as proxy,
            RawClient(proxy.bootstrap, QUERY) as client,
        ):
            client.ask(fetch(UNTAGGED, TOPIC))
            poster = ReportPoster(proxy, TOPIC, QUERY)
            assert poster.post(poster.event(batch=poster.batch(1, 0, 5)))[0] == OK
            until(lambda: broker.asked[CLIENT_ID, api_key] >= TRIES, "it is asked again")
            client.ask(fetch(UNTAGGED, TOPIC))


EMPTY_MESSAGE = bytes([12, 0, 0, 0, 1, 1, 0])
"""Its length, attributes, time and offset, no key, no value, no headers."""
MESSAGES = 2_000_000
ROWS = 100_000
GZIP = 1


def test_a_bomb_in_the_topic_of_the_state_is_not_unpacked(tmp_path: Path) -> None:
    """Of 20 KB: who may write to the topic can put it there."""
    packed = gzip.compress(EMPTY_MESSAGE * MESSAGES)
    counted = pack(">hiqqqhii", GZIP, MESSAGES - 1, 0, 0, -1, -1, -1, MESSAGES) + packed
    bomb = pack(">qiibI", 0, len(counted) + 9, 0, 2, calc_crc32c(counted)) + counted

    def configs(head: RequestHead) -> bytes:
        result = APIS[DESCRIBE_CONFIGS].response.DescribeConfigsResult
        settings = {"cleanup.policy": "compact", "compression.type": "producer"}
        entries = [
            result.DescribeConfigsResourceResult(name=name, value=value, config_source=1)
            for name, value in settings.items()
        ]
        topic = result(resource_type=2, resource_name=TOPIC, configs=entries)
        return body(DESCRIBE_CONFIGS, head.api_version, results=[topic])

    def fetched(head: RequestHead) -> bytes:
        topic = APIS[FETCH].response.FetchableTopicResponse
        part = topic.PartitionData(high_watermark=9, aborted_transactions=[], records=bomb)
        return body(FETCH, head.api_version, responses=[topic(topic=TOPIC, partitions=[part])])

    def offsets(head: RequestHead) -> bytes:
        at_the_start = broker.asked[CLIENT_ID, LIST_OFFSETS] == 1
        return ends(head).replace(pack(">q", 9), pack(">q", 0)) if at_the_start else ends(head)

    with ScriptedBroker({}) as broker:
        broker.answers.update(_cluster_of(broker) | {DESCRIBE_CONFIGS: configs, FETCH: fetched})
        ends, broker.answers[LIST_OFFSETS] = broker.answers[LIST_OFFSETS], offsets
        settings = config(broker.bootstrap, state={"kind": "kafka", "topic": TOPIC})
        process = ProxyProcess(settings, tmp_path)
        code, _, errors = quota_proxy("run", "-c", process.config_file)
    assert (code, "it has more than 100000 messages" in errors) == (1, True), errors


async def test_an_answer_that_is_longer_than_any_of_its_kind_is_not_decoded() -> None:
    row = APIS[LIST_OFFSETS].response.ListOffsetsTopicResponse.ListOffsetsPartitionResponse
    topic = APIS[LIST_OFFSETS].response.ListOffsetsTopicResponse(partitions=[row()] * ROWS)

    def many(head: RequestHead) -> bytes:
        return body(LIST_OFFSETS, head.api_version, topics=[topic])

    with ScriptedBroker({LIST_OFFSETS: many}) as broker:
        client = KafkaClient(Bootstrap([(broker.host, broker.port)]))
        request = message(LIST_OFFSETS, 2, replica_id=-1, isolation_level=0, topics=[])
        with pytest.raises(UpstreamError, match="a response of") as caught:
            await client.ask(request)
        assert caught.value.reason == "bad_response"
        client.close()


async def test_of_leaders_only_those_are_kept_that_were_asked_for() -> None:
    """Else a broker could have a member that asks each second keep ever more."""
    with ScriptedBroker({}) as broker:
        broker.answers.update(_cluster_of(broker))
        client = KafkaClient(Bootstrap([(broker.host, broker.port)]))
        there = (broker.host, broker.port)
        assert await client.leaders({("other", 0)}) == {}
        assert list(client.known_leaders([(TOPIC, 0)])) == []
        assert await client.leaders({(TOPIC, 0)}) == {there: [(TOPIC, 0)]}
        client.close()


async def test_a_round_that_makes_no_sense_ends_no_member() -> None:
    """It says that the member leads a group without members."""
    lost: list[None] = []

    async def released(_slots: frozenset[int]) -> None:
        pass

    async def held(_generation: int) -> bool:
        return False

    loop, is_asked_again = asyncio.get_running_loop(), asyncio.Event()

    def joined(_: RequestHead) -> bytes:
        if broker.asked[CLIENT_ID, JOIN_GROUP] >= TRIES:
            loop.call_soon_threadsafe(is_asked_again.set)
        return bytes(64)

    with ScriptedBroker({}) as broker:
        broker.answers.update(_cluster_of(broker))
        broker.answers[JOIN_GROUP] = joined
        member = GroupMember(
            Bootstrap([(broker.host, broker.port)]),
            "group",
            SlotStates(),
            lambda: Subscription(MemberAddresses("a", {}), "http://a", "cluster", "rules", 1.0),
            on_assigned=lambda: None,
            on_revoked=released,
            on_lost=lambda: lost.append(None),
            may_hold=held,
        )
        running_member = asyncio.create_task(member.run())
        await asyncio.wait_for(is_asked_again.wait(), TRIES_LIMIT_S)
        assert "makes no sense" in (member.problem or "")
        member.stop()
        await running_member
    assert not lost


def _cluster_of(broker: ScriptedBroker) -> dict[int, Answer]:
    """Return honest answers about a topic with one partition that is empty."""

    def metadata(head: RequestHead) -> bytes:
        response = APIS[METADATA].response
        topic = response.MetadataResponseTopic
        part = topic.MetadataResponsePartition(leader_id=1, replica_nodes=[1], isr_nodes=[1])
        node = response.MetadataResponseBroker(node_id=1, host=broker.host, port=broker.port)
        topics = [topic(name=TOPIC, partitions=[part])]
        return body(METADATA, head.api_version, brokers=[node], topics=topics, controller_id=1)

    def ends(head: RequestHead) -> bytes:
        topic = APIS[LIST_OFFSETS].response.ListOffsetsTopicResponse
        part = topic.ListOffsetsPartitionResponse(offset=9)
        return body(LIST_OFFSETS, head.api_version, topics=[topic(name=TOPIC, partitions=[part])])

    def fetched(head: RequestHead) -> bytes:
        topic = APIS[FETCH].response.FetchableTopicResponse
        part = topic.PartitionData(high_watermark=9, records=b"")
        return body(FETCH, head.api_version, responses=[topic(topic=TOPIC, partitions=[part])])

    def committed(head: RequestHead) -> bytes:
        topic = APIS[ApiKey.OffsetFetch].response.OffsetFetchResponseTopic
        part = topic.OffsetFetchResponsePartition(committed_offset=1, metadata="")
        topics = [topic(name=TOPIC, partitions=[part])]
        return body(ApiKey.OffsetFetch, head.api_version, topics=topics)

    def found(head: RequestHead) -> bytes:
        at = {"node_id": 1, "host": broker.host, "port": broker.port}
        return body(FIND_COORDINATOR, head.api_version, **at)

    return {
        METADATA: metadata,
        LIST_OFFSETS: ends,
        FETCH: fetched,
        FIND_COORDINATOR: found,
        ApiKey.OffsetFetch: committed,
        ApiKey.OffsetCommit: lambda head: body(ApiKey.OffsetCommit, head.api_version, topics=[]),
    }


def _following(broker: ScriptedBroker, folder: Path) -> ProxyProcess:
    return ProxyProcess(config(broker.bootstrap, queries=[{"name": QUERY}]), folder)
