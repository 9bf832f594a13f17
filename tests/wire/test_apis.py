"""The table of APIs against the schemas that it is derived from."""

from struct import pack

import pytest
from kafka.protocol.api_key import ApiKey

from proxy.wire import apis
from proxy.wire.apis import API_VERSIONS, APIS, FETCH, METADATA, PRODUCE, Handling
from proxy.wire.layout import RecordLayout, request_layout, response_layout
from proxy.wire.rewrite import raise_throttle_time

EVERY_VERSION = [
    (key, version) for key, api in APIS.items() for version in range(api.max_version + 1)
]

CONTROLLERS_ONLY = {ApiKey.DescribeQuorum}
"""Responses with host and port of raft listeners, where no client fetches or produces."""


HIDDEN = (ApiKey.ShareGroupHeartbeat, ApiKey.ShareFetch, ApiKey.ShareAcknowledge)


def test_every_schema_is_known():
    assert set(APIS) >= {0, 1, 2, 3, 8, 9, 10, 11, 12, 13, 14, 17, 18, 36, 60, 75}
    assert all(api.request.API_KEY == key == api.response.API_KEY for key, api in APIS.items())


def names_port(schema, version):
    return any(
        field.name == "port"
        or (
            bool(field.fields)
            and names_port(field.array_of if field.is_array() else field, version)
        )
        for field in schema.fields.values()
        if field.for_version_q(version)
    )


def test_every_response_that_names_a_port_is_rewritten_and_that_of_api_versions():
    for key, version in EVERY_VERSION:
        asked = apis.forwarded_api_version(key, version)
        carries = names_port(apis.message_schema(APIS[key].response), asked) or key == API_VERSIONS
        handled = apis.plan_of(key, asked).handling is Handling.REWRITE
        assert carries == handled or key in CONTROLLERS_ONLY, (key, version)


HANDLING = {
    "ListOffsets": (2, 9, Handling.PASS),
    "ListOffsets of the future": (2, 12, Handling.REFUSE),
    "InitProducerId": (22, 6, Handling.PASS),
    "DescribeTopicPartitions": (75, 0, Handling.PASS),
    "ConsumerGroupHeartbeat": (68, 1, Handling.PASS),
    "ConsumerGroupHeartbeat of the future": (68, 2, Handling.REFUSE),
    "ConsumerGroupHeartbeat below zero": (68, -1, Handling.REFUSE),
    "PushTelemetry": (72, 0, Handling.PASS),
    "CreateDelegationToken": (38, 3, Handling.PASS),
    "Produce before endpoints": (0, 9, Handling.PASS),
    "Produce with endpoints": (0, 10, Handling.REWRITE),
    "Produce of the future": (0, 14, Handling.REFUSE),
    "Fetch before endpoints": (1, 15, Handling.PASS),
    "Fetch of old": (1, 0, Handling.PASS),
    "Fetch 18": (1, 18, Handling.PASS),
    "Fetch of the future": (1, 19, Handling.REFUSE),
    "Metadata 0": (3, 0, Handling.REWRITE),
    "Metadata 13": (3, 13, Handling.REWRITE),
    "Metadata of the future": (3, 14, Handling.REFUSE),
    "Metadata below zero": (3, -1, Handling.REFUSE),
    "FindCoordinator": (10, 6, Handling.REWRITE),
    "FindCoordinator of the future": (10, 7, Handling.REFUSE),
    "DescribeCluster": (60, 2, Handling.REWRITE),
    "ShareGroupHeartbeat": (76, 1, Handling.REFUSE),
    "ShareGroupDescribe": (77, 1, Handling.PASS),
    "ShareFetch": (78, 1, Handling.REFUSE),
    "ShareAcknowledge": (79, 0, Handling.REFUSE),
    "ApiVersions": (18, 4, Handling.REWRITE),
    "ApiVersions of the future": (18, 99, Handling.REWRITE),
    "SaslAuthenticate": (36, 2, Handling.PASS),
    "SaslAuthenticate of the future": (36, 3, Handling.REFUSE),
    "between brokers": (58, 0, Handling.UNKNOWN),
    "unknown api": (999, 3, Handling.UNKNOWN),
    "negative api": (-5, 3, Handling.UNKNOWN),
}


@pytest.mark.parametrize("name", HANDLING)
def test_handling(name):
    api_key, version, expected = HANDLING[name]
    assert apis.plan_of(api_key, version).handling is expected


def test_names_are_bounded():
    assert apis.api_name(1) == "Fetch"
    assert apis.api_name(78) == "ShareFetch"
    assert {apis.api_name(key) for key in (-1, 93, 999, 32767)} == {"unknown"}


SAFE = {
    "Produce": (0, 13),
    "Fetch, without leader hints": (1, 15),
    "ListOffsets": (2, 11),
    "Metadata": (3, 13),
    "FindCoordinator": (10, 6),
    "SaslHandshake": (17, 1),
    "ApiVersions": (18, 4),
    "SaslAuthenticate": (36, 2),
    "DescribeDelegationToken": (41, 3),
    "DescribeCluster": (60, 2),
    "ConsumerGroupDescribe": (69, 1),
    "ShareGroupHeartbeat": (76, -1),
    "ShareFetch": (78, -1),
    "ShareAcknowledge": (79, -1),
}


@pytest.mark.parametrize("name", SAFE)
def test_max_safe_version(name):
    api_key, expected = SAFE[name]
    assert apis.last_offered_version(api_key) == expected
    assert apis.last_offered_version(api_key, passes_unknown=True) == expected


@pytest.mark.parametrize("api_key", [-1, 58, 999])
def test_an_unknown_api_has_no_safe_version_unless_it_passes(api_key):
    assert apis.last_offered_version(api_key) == -1
    assert apis.last_offered_version(api_key, passes_unknown=True) is None


def test_what_was_reviewed_has_no_schema_and_what_has_one_no_other_version():
    """A schema's last version takes the place of one that was written down."""
    reviewed = {key for key in range(100) if apis.api_of(key).max_version >= 0} - APIS.keys()
    hidden = {key.value for key in HIDDEN}
    assert reviewed == {38, 39, 40, 41, 64, 68, 69, 71, 72, 77, 80, 81, 88, 89, 90, 91, 92}
    assert not hidden & (reviewed | APIS.keys())
    assert {apis.api_of(key).max_version for key in hidden} == {-1}


FAMILIES = {
    PRODUCE: ("produce", "producer_byte_rate"),
    FETCH: ("fetch", "consumer_byte_rate"),
    METADATA: ("request", None),
    999: ("request", None),
}


@pytest.mark.parametrize("api_key", FAMILIES)
def test_family_and_byte_rate(api_key):
    api = apis.api_of(api_key)
    assert (api.family, api.byte_rate) == FAMILIES[api_key]


@pytest.mark.parametrize(
    ("api_key", "takes_whole", "costs_time"),
    [(17, True, False), (36, True, False), (3, False, True), (18, True, True), (11, False, False)],
)
def test_what_is_taken_whole_and_what_costs_time(api_key, takes_whole, costs_time):
    plan = apis.plan_of(api_key, 0)
    assert (plan.takes_whole, plan.costs_time) == (takes_whole, costs_time)


THROTTLE_OFFSETS = {(0, 9): 0, (1, 0): 0, (1, 1): 8, (1, 12): 9, (999, 1): 0}


def test_throttle_offset_is_where_the_codec_reads_it(filler):
    seen = set()
    for key, version in EVERY_VERSION:
        offset = apis.plan_of(key, version).throttle_offset
        names = [
            field.name for field in apis.message_schema(APIS[key].response).untagged_fields(version)
        ]
        assert (offset > 0) == (names[:1] == ["throttle_time_ms"])
        if not offset:
            continue
        seen.add(key)
        frame = bytearray(filler(version, values={"throttle_time_ms": 5}).response(key, version))
        raise_throttle_time(frame, offset, 123456)
        body = bytes(frame[apis.plan_of(key, version).body_offset :])
        assert APIS[key].response.decode(body, version=version).throttle_time_ms == 123456
    assert len(seen) > 40
    offsets = {case: apis.plan_of(*case).throttle_offset for case in THROTTLE_OFFSETS}
    assert offsets == THROTTLE_OFFSETS


def test_response_header_is_flexible_as_the_codec_has_it():
    for key, version in EVERY_VERSION:
        response = APIS[key].response()
        response.with_header(correlation_id=1)
        header = response.encode_header(flexible=response.flexible_version_q(version))
        assert apis.plan_of(key, version).is_flexible == (len(header) == 5)
        assert apis.plan_of(key, version).body_offset == 4 + len(header)


@pytest.mark.parametrize(
    ("api_key", "version", "expected"),
    [(1, 7, False), (1, 8, True), (0, 5, False), (0, 6, True), (3, 13, False), (999, 9, False)],
)
def test_clients_throttle(api_key, version, expected):
    assert apis.plan_of(api_key, version).clients_throttle is expected


def test_membership():
    assert [key for key in range(-1, 100) if apis.api_of(key).is_membership] == [
        11,
        12,
        13,
        14,
        68,
        76,
        88,
    ]


@pytest.mark.parametrize("version", range(5))
def test_api_versions_is_asked_for_in_the_version_of_the_client(version):
    assert apis.forwarded_api_version(API_VERSIONS, version) == version


def test_api_versions_that_is_too_new_is_asked_for_in_a_version_that_no_broker_knows():
    frame = bytearray(pack(">ihhih", 10, API_VERSIONS, 5, 7, -1))
    apis.set_request_version(frame, apis.forwarded_api_version(API_VERSIONS, 5))
    assert frame == pack(">ihhih", 10, API_VERSIONS, 32767, 7, -1)


def fields_of(layout):
    """What a layout has, but for tagged fields: those that are not known are skipped."""
    if isinstance(layout, RecordLayout):
        return layout.tags is None, {name: fields_of(each) for name, each in layout.fields.items()}
    if hasattr(layout, "element"):
        return layout.length, fields_of(layout.element)
    return layout.form.format if hasattr(layout, "form") else layout


@pytest.mark.parametrize("version", range(16, APIS[FETCH].max_version + 1))
def test_a_later_fetch_than_is_offered_is_the_same_as_the_last_one_that_is(version):
    asked = apis.forwarded_api_version(FETCH, version)
    assert asked == apis.last_offered_version(FETCH)
    for layout_of in (request_layout, response_layout):
        assert fields_of(layout_of(FETCH, version)) == fields_of(layout_of(FETCH, asked))
