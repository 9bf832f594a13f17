"""Layouts against the codec: they end where a message ends, for every API and version."""

import pytest

from proxy.wire.apis import APIS, message_schema
from proxy.wire.layout import UNREADABLE, request_layout, response_layout, run_generator

MESSAGES = [
    pytest.param(getattr(api, kind), layout, id=getattr(api, kind).name)
    for api in APIS.values()
    for kind, layout in (("request", request_layout), ("response", response_layout))
]


@pytest.mark.parametrize(("message", "layout"), MESSAGES)
def test_a_layout_ends_where_the_message_ends(filler, message, layout):
    for version in range(message.max_version + 1):
        record = layout(message.API_KEY, version)
        for seed in range(6):
            values = {"error_code": 0}  # the codec reads a refused ApiVersions as version 0
            body = filler(seed, unknown_tags=True, values=values).body(message, version)
            assert message.decode(body, version=version) is not None
            assert record.skip(body + b"more", 0) == len(body)
            spans, end = run_generator(record.spans(body, 0))
            assert (spans.keys(), end) == (record.fields.keys(), len(body))
            assert record.seek(None, body, 0) == max([0, *(end for _, end in spans.values())])
            for cut in (0, len(body) // 2, len(body) - 1):
                if 0 <= cut < len(body):
                    with pytest.raises(UNREADABLE):
                        record.skip(body[:cut], 0)


def elements(node):
    """The layouts of all array elements in a layout, at any depth."""
    if hasattr(node, "element"):
        yield node.element
    inner = [getattr(node, "element", None), getattr(node, "record", None)]
    for each in [*inner, *getattr(node, "fields", {}).values()]:
        yield from elements(each) if each is not None else ()


@pytest.mark.parametrize(("message", "layout"), MESSAGES)
def test_no_array_has_elements_without_bytes(message, layout):
    """Which bounds every loop over them. Of zeros each value is as short as can be."""
    found = 0
    for version in range(message.max_version + 1):
        for element in elements(layout(message.API_KEY, version)):
            found += 1
            assert element.skip(bytes(1000), 0) > 0
    assert found or not any(field.is_array() for field in message_schema(message).fields.values())


BAD = {
    "count beyond the end": (3, 0, b"\x7f\xff\xff\xff" + bytes(30)),
    "count of -2": (3, 0, b"\xff\xff\xff\xfe" + bytes(30)),
    "string of length -2": (3, 0, b"\0\0\0\1\0\0\0\1\xff\xfe" + bytes(30)),
    "compact count beyond the end": (3, 12, bytes(4) + b"\xff\xff\xff\xff\x0f" + bytes(30)),
    "varint without end": (3, 12, bytes(4) + b"\xff" * 8 + bytes(30)),
}


@pytest.mark.parametrize("name", BAD)
def test_lengths_that_cannot_be(name):
    api_key, version, body = BAD[name]
    with pytest.raises(UNREADABLE):
        response_layout(api_key, version).skip(body, 0)


def test_a_field_that_is_not_there():
    with pytest.raises(KeyError):
        response_layout(3, 0).seek("nothing", bytes(100), 0)


@pytest.mark.parametrize(("api_key", "version"), [(999, 0), (3, 14), (3, -1)])
@pytest.mark.parametrize("layout", [request_layout, response_layout])
def test_what_has_no_schema(layout, api_key, version):
    with pytest.raises(ValueError, match="no schema"):
        layout(api_key, version)
