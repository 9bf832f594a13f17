"""Every version that is advertised can be used; what can't be rewritten is hidden or refused."""

import json
import re
import struct
import uuid
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import TopicCollection
from confluent_kafka.admin import AdminClient, ConfigResource
from support.kafka_tools import run_tool, tool_jars
from support.proxy_process import HOST, ProxyProcess, until
from support.raw import RawClient, api_versions, fetch, message, produce

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.jars import kafka_jars
from proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    DESCRIBE_CLUSTER,
    FETCH,
    FIND_COORDINATOR,
    KNOWN_APIS,
    METADATA,
    PRODUCE,
    Handling,
    api_of,
    forwarded_api_version,
    plan_of,
)

HIDDEN_APIS = {key for key, api in KNOWN_APIS.items() if api.is_hidden}
BETWEEN_BROKERS = {83, 84, 85, 86, 87}
"""The state of share groups; brokers have them on the listener for clients."""
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
    assert theirs.keys() - ours.keys() == (HIDDEN_APIS | BETWEEN_BROKERS) & theirs.keys()
    for key, (low, high) in ours.items():
        assert low == theirs[key][0]
        if key == FETCH:
            assert high == 15, "the last one without leader hints"
        else:
            assert high == min(theirs[key][1], api_of(key).max_version), key
            assert high == theirs[key][1], "nothing else of this broker is held back"


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
    with AdminClient({"bootstrap.servers": kafka.bootstrap}) as admin:
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
    """The broker's host and port must be in no frame as Kafka writes them, one after the other."""
    name, request_of = used
    running = proxy()
    real_address = HOST.encode() + struct.pack(">i", kafka.port)
    with RawClient(running.bootstrap) as client:
        known = advertised(client)
        client.ask(produce(9, name, b"first"))
        find = request_of(FIND_COORDINATOR, 3)
        until(lambda: client.ask(find).error_code == 0, "the broker has made its groups topic")
        for api_key in CAPPED:
            low, high = known[api_key]
            if api_key == FETCH:  # of which later ones are not advertised, and work
                high = APIS[FETCH].max_version
            for version in range(max(low, FIRST_USABLE.get(api_key, 0)), high + 1):
                request = request_of(api_key, version)
                case = f"{APIS[api_key].request.__name__} version {version}"
                client.sock.sendall(client.encode(request))
                frame = client.receive_frame()
                client.forget()
                assert real_address not in frame, case
                answer = APIS[api_key].response.decode(frame, version=version, header=True)
                assert not errors_in(answer.to_dict()), f"{case}: {answer}"
                if api_key in (METADATA, DESCRIBE_CLUSTER):
                    assert [broker.host for broker in answer.brokers] == [HOST], case


def test_a_brokers_settings_show_no_real_address(
    kafka: EmbeddedBroker, proxy: Callable[..., ProxyProcess]
) -> None:
    running = proxy()
    broker = ConfigResource(ConfigResource.Type.BROKER, str(kafka.settings.node_id))
    with AdminClient({"bootstrap.servers": running.bootstrap}) as admin:
        settings = admin.describe_configs([broker])[broker].result(30)
    assert settings["num.io.threads"].value
    for name in ("listeners", "advertised.listeners"):
        assert (settings[name].value, settings[name].is_sensitive) == (None, True)
    real = f":{kafka.port}"
    assert not any(real in str(each.value) + str(each.synonyms) for each in settings.values())


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


@pytest.mark.parametrize("api_key", sorted(HIDDEN_APIS))
@pytest.mark.parametrize("unknown_apis", ["hide", "pass"])
def test_hidden_apis_are_refused(
    proxy: Callable[..., ProxyProcess], api_key: int, unknown_apis: str
) -> None:
    running = proxy(unknown_apis=unknown_apis)
    with RawClient(running.bootstrap) as client:
        assert api_key not in advertised(client)
        client.sock.sendall(struct.pack(">ihhih", 11, api_key, 1, 7, -1) + b"\0")
        assert client.is_closed_by_peer()
    running.until_counts("connections_rejected_total", 1, reason="unsupported_version")


REFUSED = {  # API key and version
    "an unknown API": (999, 1),
    "the last key": (32767, 1),
    "a negative key": (-1, 1),
    "between brokers": (58, 0),
    "ListOffsets of the future": (2, 12),
    "ConsumerGroupHeartbeat of the future": (68, 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_offered_is_refused(proxy: Callable[..., ProxyProcess], name: str) -> None:
    api_key, version = REFUSED[name]
    running = proxy()
    with RawClient(running.bootstrap) as client:
        client.sock.sendall(struct.pack(">ihhih", 10, api_key, version, 7, -1))
        assert client.is_closed_by_peer()
    running.until_counts("connections_rejected_total", 1, reason="unsupported_version")


@pytest.mark.parametrize("api_key", [999, 32767, -1])
def test_unknown_apis_are_for_the_broker_to_judge_if_they_pass(
    proxy: Callable[..., ProxyProcess], api_key: int
) -> None:
    running = proxy(unknown_apis="pass")
    with RawClient(running.bootstrap) as client:
        assert advertised(client).keys() >= BETWEEN_BROKERS
        client.sock.sendall(struct.pack(">ihhih", 10, api_key, 1, 7, -1))
        assert client.is_closed_by_peer(), "the broker closes it, and so does the proxy"
    assert running.metrics().value("connections_rejected_total") == 0
    assert running.metrics().value("requests_total", api="unknown") == 1
    with RawClient(running.bootstrap) as client:
        assert advertised(client)


def test_a_share_consumer_is_told_that_there_are_no_share_groups(
    proxy: Callable[..., ProxyProcess], topic: Callable[..., str]
) -> None:
    """It would otherwise join its group and wait for ever."""
    said = run_tool(
        "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
        proxy().bootstrap,
        "--topic",
        topic(),
        "--timeout-ms",
        "20000",
        jars=tool_jars(),
        errors=True,
    )
    assert "The cluster does not support the share group protocol" in said


CONTROLLERS_OR_CLIENTS = {
    "DescribeQuorum": {"Host", "Port"},
    "StreamsGroupHeartbeat": {"Host", "Port"},
    "StreamsGroupDescribe": {"Host", "Port"},
    "DescribeAcls": {"Host"},
    "DeleteAcls": {"Host"},
}
"""Responses that name hosts of controllers, or of clients as they call themselves."""


def test_kafkas_own_definitions_name_brokers_only_where_responses_are_rewritten() -> None:
    names = {}
    for definition in kafka_messages():
        if definition["type"] != "response":
            continue
        api_key, name = definition["apiKey"], definition["name"].removesuffix("Response")
        names[api_key] = name
        version = forwarded_api_version(api_key, api_of(api_key).max_version)
        found = {"Host", "Port"} & set(field_names(definition, version))
        if version >= 0 and found:
            is_rewritten = plan_of(api_key, version).handling is not Handling.PASS
            assert is_rewritten or CONTROLLERS_OR_CLIENTS[name] == found, name
    for api_key in KNOWN_APIS:
        assert names[api_key]


def kafka_messages() -> Iterator[dict[str, Any]]:
    """Give the definitions of all messages that are in the embedded broker's jars."""
    (clients,) = (jar for jar in kafka_jars() if jar.name.startswith("kafka-clients-"))
    with zipfile.ZipFile(clients) as jar:
        for entry in jar.namelist():
            if entry.startswith("common/message/") and entry.endswith(".json"):
                definition = json.loads(re.sub(r"(?m)(^|\s)//.*$", "", jar.read(entry).decode()))
                if "apiKey" in definition and definition["validVersions"] != "none":
                    yield definition


def field_names(definition: dict[str, Any], version: int) -> Iterator[str]:
    """Give the names of all fields up to a version, those of inner structures included."""
    for part in (*definition.get("fields", ()), *definition.get("commonStructs", ())):
        if int(re.match(r"\d+", part["versions"])[0]) <= version:
            yield part["name"]
            yield from field_names(part, version)
