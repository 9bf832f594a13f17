"""Every version that is advertised can be used; what can't be rewritten is hidden or refused."""

import struct
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, fetch, message, produce

from proxy.devkit.broker import EmbeddedBroker
from proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    DESCRIBE_CLUSTER,
    FETCH,
    FIND_COORDINATOR,
    METADATA,
    PRODUCE,
)

SHARE_FETCH, SHARE_ACKNOWLEDGE = 78, 79
UNSUPPORTED_VERSION = 35
CAPPED = (PRODUCE, FETCH, METADATA, FIND_COORDINATOR, API_VERSIONS, DESCRIBE_CLUSTER)
FIRST_USABLE = {PRODUCE: 3}
"""Kafka 4 lists older ones for the sake of librdkafka, and closes the connection when used."""
HALF = 1 << 64


def advertised(client: RawClient, version: int = 3) -> dict[int, tuple[int, int]]:
    answer = client.ask(api_versions(version))
    return {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}


@pytest.mark.parametrize("version", range(5))
def test_api_versions_are_capped(
    kafka: EmbeddedBroker, proxy: Callable[..., ProxyProcess], version: int
) -> None:
    with RawClient(proxy().bootstrap) as through, RawClient(kafka.bootstrap) as direct:
        ours, theirs = advertised(through, version), advertised(direct, version)
    assert theirs.keys() - ours.keys() == {SHARE_FETCH, SHARE_ACKNOWLEDGE} & theirs.keys()
    for key, (low, high) in ours.items():
        assert low == theirs[key][0]
        limit = APIS[key].max_version if key in CAPPED else high
        assert high == min(theirs[key][1], limit), key


def test_too_new_api_versions_request_is_told_what_there_is(
    proxy: Callable[..., ProxyProcess],
) -> None:
    with RawClient(proxy().bootstrap) as client:
        request = bytearray(client.encode(api_versions(4)))
        struct.pack_into(">h", request, 6, 99)
        client.sock.sendall(request)
        frame = client.receive_frame()
        client.forget()
        assert struct.unpack_from(">ihihhh", frame)[1:4] == (UNSUPPORTED_VERSION, 1, API_VERSIONS)
        assert advertised(client)  # the connection is still good


@pytest.fixture
def used(kafka: EmbeddedBroker, topic: Callable[..., str]) -> tuple[str, Callable[[int, int], Any]]:
    """A topic, and what to ask of it for an API and version."""
    name = topic()
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    found = admin.describe_topics(TopicCollection([name]))[name].result(30).topic_id
    high, low = found.get_most_significant_bits(), found.get_least_significant_bits()
    topic_id = uuid.UUID(int=high % HALF * HALF + low % HALF)

    def request_of(api_key: int, version: int) -> Any:
        match api_key:
            case x if x == PRODUCE:
                return produce(version, name, b"some value", topic_id=topic_id)
            case x if x == FETCH:
                return fetch(version, name, topic_id=topic_id)
            case x if x == METADATA:
                return message(METADATA, version, topics=None if version else [])
            case x if x == FIND_COORDINATOR:
                names = {"key": "g", "coordinator_keys": ["g"]}
                return message(FIND_COORDINATOR, version, key_type=0, **names)
            case x if x == DESCRIBE_CLUSTER:
                return message(DESCRIBE_CLUSTER, version, endpoint_type=1)
        return api_versions(version)

    return name, request_of


def test_every_advertised_version_works_and_shows_no_real_address(
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    used: tuple[str, Callable[[int, int], Any]],
) -> None:
    """The real port must not be in any frame as an int32, as which Kafka writes ports."""
    name, request_of = used
    running = proxy()
    real_port = struct.pack(">i", kafka.port)
    with RawClient(running.bootstrap) as client:
        known = advertised(client)
        client.ask(produce(9, name, b"first"))
        find = request_of(FIND_COORDINATOR, 3)
        until(lambda: client.ask(find).error_code == 0, "the broker has made its groups topic")
        for api_key in CAPPED:
            low, high = known[api_key]
            for version in range(max(low, FIRST_USABLE.get(api_key, 0)), high + 1):
                request = request_of(api_key, version)
                case = f"{APIS[api_key].request.__name__} version {version}"
                client.sock.sendall(client.encode(request))
                frame = client.receive_frame()
                client.forget()
                assert real_port not in frame, case
                answer = APIS[api_key].response.decode(frame, version=version, header=True)
                assert not errors_in(answer.to_dict()), f"{case}: {answer}"
                if api_key in (METADATA, DESCRIBE_CLUSTER):
                    assert [broker.host for broker in answer.brokers] == [HOST], case


def errors_in(value: Any) -> list[int]:
    """Collect every error code that is not 0."""
    if isinstance(value, list):
        return [code for each in value for code in errors_in(each)]
    if not isinstance(value, dict):
        return []
    return [
        code
        for key, each in value.items()
        for code in ([each] if key in ("error_code", "ErrorCode") and each else errors_in(each))
    ]


@pytest.mark.parametrize("api_key", [SHARE_FETCH, SHARE_ACKNOWLEDGE])
def test_hidden_apis_are_refused(proxy: Callable[..., ProxyProcess], api_key: int) -> None:
    running = proxy()
    with RawClient(running.bootstrap) as client:
        client.sock.sendall(struct.pack(">ihhih", 11, api_key, 1, 7, -1) + b"\0")
        assert client.is_closed_by_peer()
    running.until_counts("connections_rejected_total", 1, reason="unsupported_version")


@pytest.mark.parametrize("api_key", [999, 32767, -1])
def test_unknown_apis_are_for_the_broker_to_judge(
    proxy: Callable[..., ProxyProcess], api_key: int
) -> None:
    running = proxy()
    with RawClient(running.bootstrap) as client:
        client.sock.sendall(struct.pack(">ihhih", 10, api_key, 1, 7, -1))
        assert client.is_closed_by_peer(), "the broker closes it, and so does the proxy"
    assert running.metrics().value("connections_rejected_total") == 0
    assert running.metrics().value("requests_total", api="unknown") == 1
    with RawClient(running.bootstrap) as client:
        assert advertised(client)
