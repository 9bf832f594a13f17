"""A broker that lies about lengths and counts harms nobody but the client that asked it."""

from pathlib import Path
from struct import pack

import psutil
import pytest
from support.operating import running
from support.proxy_process import ProxyProcess, config
from support.raw import RawClient, api_versions, fetch, message, records
from support.scripted_broker import ScriptedBroker, body

from proxy.wire.apis import APIS, FETCH, FIND_COORDINATOR, RESPONSE_HEADER_BYTES
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


def _following(broker: ScriptedBroker, folder: Path) -> ProxyProcess:
    return ProxyProcess(config(broker.bootstrap, queries=[{"name": QUERY}]), folder)
