"""Rewriting: only addresses change, none survives, and everything else stays byte for byte."""

import contextlib
from functools import partial
from struct import pack

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.wire.apis import (
    API_VERSIONS,
    APIS,
    DESCRIBE_CLUSTER,
    DESCRIBE_CONFIGS,
    FETCH,
    FIND_COORDINATOR,
    METADATA,
    PRODUCE,
    last_offered_version,
    message_schema,
    plan_of,
)
from proxy.wire.frames import MalformedResponse, check_whole_response
from proxy.wire.layout import STEP_ELEMENTS, run_generator
from proxy.wire.rewrite import (
    FALLBACK_NODE_ID,
    brokers_end,
    empty_broker_response,
    raise_throttle_time,
    rewrite_in_steps,
    with_throttle_time,
    without_config_addresses,
)

TOLD = ("proxy.example", 19100)
REWRITTEN = [
    (key, version)
    for key, api in APIS.items()
    for version in range(api.first_with_addresses, api.max_version + 1)
]
LEAVING_OUT = [case for case in REWRITTEN if case[0] != FIND_COORDINATOR]
"""Those that leave out a broker without address; FindCoordinator answers with an error."""

SEEDS = range(12)
MANY = 2000
BROKER, TOPIC = 4, 2
"""Types of resources."""

NO_CONTROLLERS = {"endpoint_type": 1}


def rewrite_response(api_key, version, frame, advertise, **settings):
    """Take all steps with a frame that is whole."""
    check_whole_response(frame)
    return run_generator(rewrite_in_steps(api_key, version, frame, advertise, **settings))


def same(_node, host, port):
    return host, port


def tell_proxy(_node, _host, _port):
    return TOLD


def tell_none(_node, _host, _port):
    return None


def tell_long_names_of_even_nodes(node, _host, _port):
    return None if node % 2 else (f"broker-{node}.{'x' * 150}.example", 19100)


def whole(steps):
    """Take all steps."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def throttled(api_key, version, frame, throttle_ms):
    return whole(with_throttle_time(api_key, version, frame, throttle_ms))


def decode(api_key, version, frame):
    body = bytes(frame[plan_of(api_key, version).body_offset :])
    return APIS[api_key].response.decode(body, version=version).to_dict()


def brokers(message):
    """The parts of a decoded message that carry an address."""
    found = []
    for field in ("brokers", "coordinators", "node_endpoints"):
        found += message.get(field) or []
    return found + ([message] if "host" in message else [])


@pytest.mark.parametrize(("api_key", "version"), REWRITTEN)
def test_same_addresses_give_the_same_bytes(filler, api_key, version):
    """Unknown tags, nulls, racks, topic ids and bit fields included."""
    values = {"error_code": 0, **NO_CONTROLLERS}
    for seed in SEEDS:
        frame = filler(seed, unknown_tags=True, values=values).response(api_key, version)
        rewritten = rewrite_response(api_key, version, frame, same)
        assert rewritten == frame


@pytest.mark.parametrize(("api_key", "version"), REWRITTEN)
def test_only_addresses_change(filler, api_key, version):
    changed = 0
    for seed in SEEDS:
        make = filler(seed, unknown_tags=True, values={"error_code": 0, **NO_CONTROLLERS})
        frame = make.response(api_key, version)
        before = decode(api_key, version, frame)
        rewritten = rewrite_response(api_key, version, frame, tell_proxy)
        assert filler.host_marker not in rewritten
        assert rewritten[:4] == pack(">i", len(rewritten) - 4)
        for broker in brokers(before):
            broker["host"], broker["port"] = TOLD
            changed += 1
        assert decode(api_key, version, rewritten) == before
        if not brokers(before):
            assert rewritten is frame
    assert changed > 0


@pytest.mark.parametrize(("api_key", "version"), REWRITTEN)
@pytest.mark.parametrize("advertise", [tell_none, tell_long_names_of_even_nodes, tell_proxy])
def test_no_real_host_survives(filler, api_key, version, advertise):
    """Not even beside an error code, which random messages nearly always have."""
    for seed in SEEDS:
        for values in ({}, {"error_code": 0}):
            make = filler(seed, unknown_tags=True, values={**values, **NO_CONTROLLERS})
            frame = make.response(api_key, version)
            rewritten = rewrite_response(api_key, version, frame, advertise)
            assert filler.host_marker not in rewritten
            decode(api_key, version, rewritten)


@pytest.mark.parametrize(("api_key", "version"), LEAVING_OUT)
def test_brokers_without_address_are_left_out(filler, api_key, version):
    left_out = 0
    for seed in SEEDS:
        frame = filler(seed, values=NO_CONTROLLERS).response(api_key, version)
        expected = decode(api_key, version, frame)
        for field in ("brokers", "node_endpoints"):
            if field in expected:
                kept = []
                for broker in expected[field]:
                    node = broker.get("broker_id", broker.get("node_id"))
                    told = tell_long_names_of_even_nodes(node, "", 0)
                    if told:
                        kept.append({**broker, "host": told[0], "port": told[1]})
                left_out += len(expected[field]) - len(kept)
                expected[field] = kept
        rewritten = rewrite_response(api_key, version, frame, tell_long_names_of_even_nodes)
        assert decode(api_key, version, rewritten) == expected
    assert left_out > 0


def test_the_caller_learns_every_real_address(filler):
    for api_key, version in LEAVING_OUT:
        frame = filler(3, values=NO_CONTROLLERS).response(api_key, version)
        learnt = []

        def learn(node, host, port, learnt=learnt):
            learnt.append((node, host, port))
            return TOLD

        rewrite_response(api_key, version, frame, learn)
        assert learnt == [
            (broker.get("broker_id", broker.get("node_id")), broker["host"], broker["port"])
            for broker in brokers(decode(api_key, version, frame))
        ]


COORDINATORS = {  # error, node, host, port, advertise -> the same after rewriting
    "known": ((0, 5, "real-broker", 9092), tell_proxy, (0, 5, *TOLD)),
    "not reachable": ((0, 5, "real-broker", 9092), tell_none, (15, -1, "", -1)),
    "error": ((15, -1, "", -1), tell_proxy, (15, -1, "", -1)),
    "error without proxy": ((15, -1, "", -1), tell_none, (15, -1, "", -1)),
    "error with a host": ((16, 5, "real-broker", 9092), tell_proxy, (16, -1, "", -1)),
    "no node with a host": ((0, -1, "real-broker", 9092), tell_proxy, (15, -1, "", -1)),
}


@pytest.mark.parametrize("name", COORDINATORS)
def test_find_coordinator(name):
    (error, node, host, port), advertise, expected = COORDINATORS[name]
    response = APIS[FIND_COORDINATOR].response
    fields = {"error_code": error, "node_id": node, "host": host, "port": port}
    for version in range(response.max_version + 1):
        if version < 4:
            message = response(version=version, error_message="why", **fields)
        else:
            one = response.Coordinator(version=version, key="g", error_message=None, **fields)
            message = response(version=version, coordinators=[one, one])
        message.with_header(correlation_id=9)
        frame = bytes(message.encode(header=True, framed=True))
        rewritten = decode(
            FIND_COORDINATOR, version, rewrite_response(FIND_COORDINATOR, version, frame, advertise)
        )
        found = brokers(rewritten)
        assert len(found) == (1 if version < 4 else 2)
        for one in found:
            assert (one["error_code"], one["node_id"], one["host"], one["port"]) == expected


def test_controllers_pass(filler):
    """They serve no topic data, and the proxy has no port for them."""
    asked = []
    for version in (1, 2):
        for seed in SEEDS:
            make = filler(seed, values={"endpoint_type": 2})
            frame = make.response(DESCRIBE_CLUSTER, version)
            assert rewrite_response(DESCRIBE_CLUSTER, version, frame, asked.append) is frame
    assert asked == []


GOLDEN = {
    "Metadata 0": (
        METADATA,
        0,
        b"\0\0\0\7" + b"\0\0\0\1" + b"\0\0\0\1\0\3abc\0\0\x23\x84" + b"\0\0\0\0",
        b"\0\0\0\7" + b"\0\0\0\1" + b"\0\0\0\1\0\x0dproxy.example\0\0\x4a\x9c" + b"\0\0\0\0",
    ),
    "FindCoordinator 0": (
        FIND_COORDINATOR,
        0,
        b"\0\0\0\7" + b"\0\0" + b"\0\0\0\1\0\3abc\0\0\x23\x84",
        b"\0\0\0\7" + b"\0\0" + b"\0\0\0\1\0\x0dproxy.example\0\0\x4a\x9c",
    ),
    "DescribeCluster 0 with a tag in the header": (
        DESCRIBE_CLUSTER,
        0,
        b"\0\0\0\7\1\x05\1x"
        + b"\0\0\0\0\0\0\0\2c\0\0\0\1"
        + b"\2\0\0\0\1\4abc\0\0\x23\x84\0\0"
        + b"\x80\0\0\0\0",
        b"\0\0\0\7\1\x05\1x"
        + b"\0\0\0\0\0\0\0\2c\0\0\0\1"
        + b"\2\0\0\0\1\x0eproxy.example\0\0\x4a\x9c\0\0"
        + b"\x80\0\0\0\0",
    ),
    "Produce 10, tags 0 and 9": (
        PRODUCE,
        10,
        b"\0\0\0\7\0" + b"\1\0\0\0\0" + b"\2\0\x10\2\0\0\0\1\4abc\0\0\x23\x84\2r\0\x09\1x",
        b"\0\0\0\7\0"
        + b"\1\0\0\0\0"
        + b"\2\0\x1a\2\0\0\0\1\x0eproxy.example\0\0\x4a\x9c\2r\0\x09\1x",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    api_key, version, before, after = GOLDEN[name]
    frame = pack(">i", len(before)) + before
    assert rewrite_response(api_key, version, frame, tell_proxy) == pack(">i", len(after)) + after


BROKER_VERSIONS = {  # key: what a broker offers -> what clients may use
    PRODUCE: ((0, 20), (0, 13)),
    FETCH: ((4, 18), (4, 15)),
    2: ((1, 99), (1, 11)),
    METADATA: ((0, 14), (0, 13)),
    FIND_COORDINATOR: ((7, 9), None),
    API_VERSIONS: ((0, 7), (0, 4)),
    DESCRIBE_CLUSTER: ((0, 1), (0, 1)),
    68: ((0, 2), (0, 1)),
    76: ((1, 1), None),
    78: ((1, 1), None),
    79: ((0, 1), None),
}

UNKNOWN_VERSIONS = {500: (0, 3), -1: (0, 0), 82: (0, 9)}


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("error", [0, 35])
@pytest.mark.parametrize("passes_unknown", [False, True])
def test_api_versions_are_capped(version, error, passes_unknown):
    response = APIS[API_VERSIONS].response
    written = 0 if error else version
    offered = {key: here for key, (here, _) in BROKER_VERSIONS.items()} | UNKNOWN_VERSIONS
    message = response(
        version=written,
        error_code=error,
        throttle_time_ms=17,
        finalized_features_epoch=4,
        api_keys=[
            response.ApiVersion(api_key=key, min_version=low, max_version=high, version=written)
            for key, (low, high) in offered.items()
        ],
    )
    message.with_header(correlation_id=9)
    frame = bytes(message.encode(header=True, framed=True))
    rewritten = rewrite_response(
        API_VERSIONS, version, frame, tell_none, passes_unknown=passes_unknown
    )
    assert rewritten[:8] == pack(">ii", len(rewritten) - 4, 9)
    after = response.decode(rewritten[8:], version=version)
    found = {key.api_key: (key.min_version, key.max_version) for key in after.api_keys}
    expected = {key: told for key, (_, told) in BROKER_VERSIONS.items() if told}
    assert found == (expected | UNKNOWN_VERSIONS if passes_unknown else expected)
    assert after.error_code == error
    if written >= 1:
        assert after.throttle_time_ms == 17
    if written >= 3:
        assert after.finalized_features_epoch == 4


def test_an_old_brokers_refusal_without_versions_stays():
    frame = pack(">iihi", 10, 9, 35, 0)
    assert rewrite_response(API_VERSIONS, 4, frame, tell_none) is frame
    assert rewrite_response(API_VERSIONS, 9, frame, tell_none) is frame


def test_api_versions_that_are_remembered_keep_their_correlation_ids(filler):
    changed = 0
    for seed in SEEDS:
        make = filler(seed, values={"error_code": 0, "api_key": FETCH, "max_version": 99})
        frame = make.response(API_VERSIONS, 4)
        told = set()
        for correlation_id in (7, 2**31 - 1, 7):
            asked = frame[:4] + pack(">i", correlation_id) + frame[8:]
            after = rewrite_response(API_VERSIONS, 4, asked, tell_none)
            assert after[:8] == pack(">ii", len(after) - 4, correlation_id)
            told.add(after[8:])
        assert len(told) == 1
        changed += frame[8:] not in told
    assert changed


def test_api_versions_keeps_unknown_tags(filler):
    for version in range(5):
        for seed in SEEDS:
            make = filler(seed, unknown_tags=True, values={"error_code": 0, "api_key": 999})
            frame = make.response(API_VERSIONS, version)
            told = rewrite_response(API_VERSIONS, version, frame, tell_none, passes_unknown=True)
            assert told is frame


def test_no_api_above_its_safe_version_survives(filler):
    for key in (PRODUCE, FETCH, METADATA, 2, 68, 78, 999):
        for seed in SEEDS:
            values = {"error_code": 0, "api_key": key}
            frame = filler(seed, values=values).response(API_VERSIONS, 4)
            after = decode(API_VERSIONS, 4, rewrite_response(API_VERSIONS, 4, frame, tell_none))
            for entry in after["api_keys"]:
                assert entry["max_version"] <= last_offered_version(key)


def test_throttle_time_is_raised_wherever_the_codec_reads_it(filler):
    """Produce and the few others that have it behind other fields included."""
    raised = set()
    for key, api in APIS.items():
        for version in range(api.max_version + 1):
            values = {"throttle_time_ms": 250, "error_code": 0}
            frame = filler(version, unknown_tags=True, values=values).response(key, version)
            fields = {field.name for field in message_schema(api.response).untagged_fields(version)}
            after = throttled(key, version, frame, 123456)
            if "throttle_time_ms" not in fields:
                assert after is frame
                continue
            raised.add(key)
            assert decode(key, version, after)["throttle_time_ms"] == 123456
            assert len(after) == len(frame)
            assert sum(a != b for a, b in zip(after, frame, strict=True)) <= 4
            assert throttled(key, version, frame, 249) == frame
    assert {PRODUCE, FETCH, 47, 18} <= raised
    assert len(raised) > 40


def test_throttle_time_of_unknown_responses():
    assert throttled(999, 1, b"anything", 5) == b"anything"
    assert throttled(FETCH, 99, b"anything", 5) == b"anything"
    refused = pack(">iihi", 10, 9, 35, 0)
    assert throttled(API_VERSIONS, 4, refused, 5) is refused


@pytest.mark.parametrize(
    ("present", "ours", "expected"),
    [(0, 5, 5), (7, 5, 7), (5, 5, 5), (0, 2**40, 2**31 - 1), (-1, 0, 0)],
)
def test_raise_throttle_time(present, ours, expected):
    head = bytearray(pack(">iii", 99, 1, present))
    raise_throttle_time(head, 8, ours)
    assert head == pack(">iii", 99, 1, expected)


@given(
    case=st.sampled_from([*REWRITTEN, (API_VERSIONS, 0), (API_VERSIONS, 4)]),
    body=st.binary(max_size=120),
)
@example(case=(METADATA, 0), body=b"\0\0\0\7\x7f\xff\xff\xff")
@example(case=(METADATA, 0), body=b"\0\0\0\7\0\0\0\1\0\0\0\1\0\3\xff\xfe\xfd\0\0\0\0")
@example(case=(API_VERSIONS, 9), body=b"\0\0\0\7\0\0\0\0\0\0")
@example(case=(METADATA, 0), body=b"")
def test_any_bytes_are_rewritten_or_malformed(case, body):
    api_key, version = case
    frame = pack(">i", len(body)) + body
    for change in (
        lambda: rewrite_response(api_key, version, frame, tell_proxy),
        lambda: throttled(api_key, version, frame, 5),
    ):
        with contextlib.suppress(MalformedResponse):
            assert len(change()) >= 8


def test_a_frame_has_to_be_whole(filler):
    frame = filler(5).response(METADATA, 9)
    for broken in (frame[:-1], frame + b"x", frame[:3]):
        with pytest.raises(MalformedResponse):
            rewrite_response(METADATA, 9, broken, tell_proxy)


@pytest.mark.parametrize("version", range(APIS[METADATA].max_version + 1))
def test_metadata_names_a_fallback_for_clients_that_know_no_other_way(filler, version):
    """Nothing else is changed."""
    for seed in SEEDS:
        frame = filler(seed, unknown_tags=True).response(METADATA, version)
        before = decode(METADATA, version, frame)
        rewritten = rewrite_response(METADATA, version, frame, same, fallback=TOLD)
        after = decode(METADATA, version, rewritten)
        added = after["brokers"].pop()
        assert (added["node_id"], added["host"], added["port"]) == (FALLBACK_NODE_ID, *TOLD)
        assert added.get("rack") is None
        assert after == {**before, "brokers": before["brokers"] or []}


def test_the_fallback_has_an_id_that_no_broker_and_no_coordinator_has():
    """Consumers keep the connection to their coordinator N under the id 2^31 - 1 - N."""
    taken = [FALLBACK_NODE_ID, 2**31 - 1 - (FALLBACK_NODE_ID - 1)]
    body = pack(">i", len(taken))
    for node_id in taken:
        body += pack(">ih", node_id, 1) + b"h" + pack(">ih", 9092, -1)
    frame = pack(">ii", len(body) + 12, 1) + body + pack(">ii", 1, 0)
    answer = decode(METADATA, 1, rewrite_response(METADATA, 1, frame, same, fallback=TOLD))
    node_ids = [broker["node_id"] for broker in answer["brokers"]]
    assert node_ids == [*taken, FALLBACK_NODE_ID - 2]


def test_no_other_response_names_a_fallback(filler):
    for api_key, version in REWRITTEN:
        if api_key != METADATA:
            frame = filler(1, values=NO_CONTROLLERS).response(api_key, version)
            expected = rewrite_response(api_key, version, frame, same)
            assert rewrite_response(api_key, version, frame, same, fallback=TOLD) == expected


PER_BROKER = [
    (key, version)
    for key, api in APIS.items()
    if api.is_per_broker
    for version in range(api.max_version + 1)
]


def expected_of_an_empty_broker(message):
    """What is left of a decoded answer, as a tool may see it of a broker without any data."""
    for array in ("groups", "transaction_states"):
        if array in message:
            message[array] = []
    for result in message.get("results") or ():
        if "topics" in result:
            result["topics"] = []
            result.update({size: -1 for size in ("total_bytes", "usable_bytes") if size in result})
        elif result["resource_type"] == BROKER and result["resource_name"] == "1999999973":
            result.update(error_code=0, error_message=None, configs=[])
    return message


@pytest.mark.parametrize(("api_key", "version"), PER_BROKER)
def test_what_is_asked_of_each_broker_is_emptied_and_nothing_else(filler, api_key, version):
    for seed in SEEDS:
        for name in (str(FALLBACK_NODE_ID), "1"):
            values = {"resource_type": BROKER, "resource_name": name}
            frame = filler(seed, unknown_tags=True, values=values).response(api_key, version)
            changed = whole(empty_broker_response(api_key, version, frame))
            check_whole_response(changed)
            expected = expected_of_an_empty_broker(decode(api_key, version, frame))
            assert decode(api_key, version, changed) == expected


SETTINGS = ("listeners", "log.dirs", "advertised.listeners")


@pytest.mark.parametrize("version", range(APIS[DESCRIBE_CONFIGS].max_version + 1))
@pytest.mark.parametrize("resource_type", [BROKER, TOPIC])
def test_of_settings_only_the_addresses_of_brokers_are_hidden(filler, version, resource_type):
    for seed in SEEDS:
        for name in SETTINGS:
            values = {"resource_type": resource_type, "name": name}
            frame = filler(seed, unknown_tags=True, values=values).response(
                DESCRIBE_CONFIGS, version
            )
            expected = decode(DESCRIBE_CONFIGS, version, frame)
            for result in expected["results"]:
                for setting in result["configs"]:
                    if resource_type == BROKER and name != "log.dirs":
                        setting.update(value=None, is_sensitive=True)
                        if version:
                            setting["synonyms"] = []
            shown = whole(without_config_addresses(version, frame))
            check_whole_response(shown)
            assert decode(DESCRIBE_CONFIGS, version, shown) == expected


def settings_response(*settings):
    """Return the answer with these settings of a broker, each in a result of its own."""
    result = APIS[DESCRIBE_CONFIGS].response.DescribeConfigsResult
    make = partial(result.DescribeConfigsResourceResult, synonyms=[])
    results = [
        result(resource_type=BROKER, resource_name="1", configs=[make(name=name, value=value)])
        for name, value in settings
    ]
    message = APIS[DESCRIBE_CONFIGS].response(version=1, results=results)
    message.with_header(correlation_id=5)
    return bytes(message.encode(header=True, framed=True))


def test_settings_of_many_brokers_are_read_in_steps():
    frame = settings_response(*[("listeners", "")] * MANY)
    assert sum(1 for _ in without_config_addresses(1, frame)) >= MANY
    other = settings_response(*[("log.dirs", "x" * 30_000)] * MANY)
    assert sum(1 for _ in without_config_addresses(1, other)) >= len(other) >> 20
    assert whole(without_config_addresses(1, other)) is other


@pytest.mark.parametrize("name", ["listeners", "advertised.listeners", "host.name"])
def test_an_address_is_found_wherever_it_lies_in_a_long_response(name):
    fill = [("log.dirs", "x" * 30_000)] * 34
    before = settings_response(*fill, ("log.dirs", ""), (name, "real")).rindex(name.encode())
    for begin in range((1 << 20) - len(name) - 1, (1 << 20) + 2):
        frame = settings_response(*fill, ("log.dirs", "x" * (begin - before)), (name, "real"))
        assert frame.rindex(name.encode()) == begin
        assert b"real" not in whole(without_config_addresses(1, frame))


def test_the_end_of_very_many_brokers_is_found_in_small_steps():
    broker = APIS[METADATA].response.MetadataResponseBroker(node_id=1, host="h", port=9)
    response = APIS[METADATA].response(version=9, brokers=[broker] * 50_000, topics=[])
    response.with_header(correlation_id=1)
    frame = bytes(response.encode(framed=True, header=True))
    steps = sum(1 for _ in brokers_end(9, frame))
    assert steps > 50_000 / STEP_ELEMENTS


@pytest.mark.parametrize("version", range(APIS[METADATA].max_version + 1))
def test_of_metadata_only_what_is_up_to_the_end_of_the_brokers_is_needed(filler, version):
    for seed in SEEDS:
        frame = filler(seed, unknown_tags=True).response(METADATA, version)
        end = run_generator(brokers_end(version, frame))
        assert end is not None
        for cut in range(8, end):
            assert run_generator(brokers_end(version, frame[:cut])) is None
        expected = rewrite_response(METADATA, version, frame, tell_proxy, fallback=TOLD)
        start = whole(rewrite_in_steps(METADATA, version, frame[:end], tell_proxy, fallback=TOLD))
        assert start + frame[end:] == expected


@pytest.mark.parametrize(
    ("api_key", "version", "fields"),
    [
        (METADATA, 9, {"brokers": lambda of: of(node_id=1, host="h", port=1)}),
        (DESCRIBE_CLUSTER, 0, {"brokers": lambda of: of(broker_id=1, host="h", port=1)}),
        (FIND_COORDINATOR, 4, {"coordinators": lambda of: of(key="g", host="h", port=1)}),
    ],
)
def test_many_addresses_are_replaced_a_few_in_a_step(api_key, version, fields):
    response, told = APIS[api_key].response, []
    ((array, make),) = fields.items()
    elements = [make(message_schema(response).fields[array].array_of)] * MANY
    message = response(version=version, **{array: elements})
    message.with_header(correlation_id=5)
    frame = bytes(message.encode(header=True, framed=True))

    def tell(*_):
        told[-1] += 1
        return TOLD

    steps = rewrite_in_steps(api_key, version, frame, tell)
    told.append(0)
    with contextlib.suppress(StopIteration):
        while True:
            next(steps)
            told.append(0)
    assert sum(told) == MANY
    assert max(told) <= STEP_ELEMENTS


@pytest.mark.parametrize(("topics", "partitions"), [(1, MANY), (MANY, 1), (50, 50)])
def test_a_produce_response_with_many_partitions_is_read_in_steps(topics, partitions):
    response = APIS[PRODUCE].response
    topic = response.TopicProduceResponse
    part = topic.PartitionProduceResponse(index=1, error_code=0, base_offset=5)
    one = topic(name="t", partition_responses=[part] * partitions)
    message = response(version=10, responses=[one] * topics)
    message.with_header(correlation_id=5)
    frame = bytes(message.encode(header=True, framed=True))
    steps = rewrite_in_steps(PRODUCE, 10, frame, tell_proxy)
    assert sum(1 for _ in steps) >= topics * partitions // (8 * STEP_ELEMENTS)


def test_a_partition_with_many_record_errors_is_read_in_steps():
    """Who writes records that a topic does not take has an error for each."""
    response = APIS[PRODUCE].response
    topic = response.TopicProduceResponse
    part = topic.PartitionProduceResponse
    errors = [part.BatchIndexAndErrorMessage(batch_index=1, batch_index_error_message="no")] * MANY
    one = topic(name="t", partition_responses=[part(index=1, error_code=87, record_errors=errors)])
    message = response(version=10, responses=[one])
    message.with_header(correlation_id=5)
    frame = bytes(message.encode(header=True, framed=True))
    for steps in (
        rewrite_in_steps(PRODUCE, 10, frame, tell_proxy),
        with_throttle_time(PRODUCE, 10, frame, 5),
    ):
        assert sum(1 for _ in steps) >= MANY // (2 * STEP_ELEMENTS)


def test_a_resource_with_many_settings_is_read_in_steps():
    response = APIS[DESCRIBE_CONFIGS].response
    result = response.DescribeConfigsResult
    settings = [result.DescribeConfigsResourceResult(name="listeners", value="real")] * MANY
    one = result(error_code=0, resource_type=TOPIC, resource_name="t", configs=settings)
    message = response(version=1, results=[one])
    message.with_header(correlation_id=5)
    frame = bytes(message.encode(header=True, framed=True))
    assert sum(1 for _ in without_config_addresses(1, frame)) >= MANY // (2 * STEP_ELEMENTS)
