"""Messages of every kind, written from the schemas without the codec, which is the oracle."""

from random import Random
from struct import pack
from typing import Any

import pytest

from proxy.wire.apis import APIS, message_schema, plan_of

HOST_MARKER = "real-broker"
UNKNOWN_TAGS = (77, 5000)
FIXED_BYTES = {
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "int64": 8,
    "float64": 8,
    "uuid": 16,
    "bitfield": 4,
}


def uvarint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


class Filler:
    """Writes random messages byte by byte. Broker hosts all contain HOST_MARKER."""

    host_marker = HOST_MARKER.encode()

    def __init__(
        self, seed: int, *, unknown_tags: bool = False, values: dict[str, Any] | None = None
    ):
        self.random = Random(seed)
        self.unknown_tags = unknown_tags
        self.values = values or {}

    def response(self, api_key: int, version: int) -> bytes:
        """A whole response frame."""
        header = pack(">i", self.random.randrange(2**31))
        header += b"\0" if plan_of(api_key, version).is_flexible else b""
        body = header + self.body(APIS[api_key].response, version)
        return pack(">i", len(body)) + body

    def body(self, message: Any, version: int) -> bytes:
        flexible = message.flexible_version_q(version)
        return self._struct(message_schema(message), version, flexible)

    def _struct(
        self, schema: Any, version: int, flexible: bool, *, nested_tag: bool = False
    ) -> bytes:
        out = b"".join(
            self._value(field, version, flexible, nested_tag=nested_tag)
            for field in schema.untagged_fields(version)
        )
        if not flexible:
            return out
        if nested_tag:  # the codec cannot read anything else
            return out + b"\0"
        tags = []
        for field in schema.fields.values():
            if field.tagged_field_q(version) and self.random.random() < 0.6:
                tags.append((field.tag, self._value(field, version, flexible, nested_tag=True)))
        if self.unknown_tags:
            for number in UNKNOWN_TAGS:
                if self.random.random() < 0.5:
                    tags.append((number, self.random.randbytes(self.random.choice((0, 3, 200)))))
        tags.sort()
        out += uvarint(len(tags))
        return out + b"".join(uvarint(n) + uvarint(len(value)) + value for n, value in tags)

    def _value(self, field: Any, version: int, flexible: bool, *, nested_tag: bool) -> bytes:
        random = self.random
        can_be_null = field.nullable_for_version_q(version)
        is_null = can_be_null and random.random() < 0.25
        if field.is_array():
            if is_null:
                return b"\0" if flexible else pack(">i", -1)
            count = random.choice((0, 1, 2, 3))
            inner = field.array_of
            items = b"".join(
                self._struct(inner, version, flexible, nested_tag=nested_tag)
                if field.is_struct_array()
                else self._value(inner, version, flexible, nested_tag=nested_tag)
                for _ in range(count)
            )
            return (uvarint(count + 1) if flexible else pack(">i", count)) + items
        if field.is_struct():
            content = self._struct(field, version, flexible, nested_tag=nested_tag)
            if can_be_null:
                return b"\xff" if is_null else b"\x01" + content
            return content
        return self._simple(field, flexible, is_null=is_null)

    def _simple(self, field: Any, flexible: bool, *, is_null: bool) -> bytes:
        random, kind = self.random, field.type_str
        if field.name in self.values and kind in ("int8", "int16", "int32"):
            return self.values[field.name].to_bytes(FIXED_BYTES[kind], "big", signed=True)
        if kind == "bool":
            return bytes([random.randrange(2)])
        if kind in FIXED_BYTES:
            return random.randbytes(FIXED_BYTES[kind])
        is_string = kind == "string"
        if is_null:
            return b"\0" if flexible else pack(">h" if is_string else ">i", -1)
        if field.name == "host":
            content = f"{HOST_MARKER}-{random.randrange(9999)}.internal".encode()
        elif is_string and field.name in self.values:
            content = str(self.values[field.name]).encode()
        elif is_string:
            content = random.choice(("", "a", "é€", "x" * 40, "y" * 140)).encode()
        else:
            content = random.randbytes(random.choice((0, 1, 20, 300)))
        prefix = (
            uvarint(len(content) + 1)
            if flexible
            else pack(">h" if is_string else ">i", len(content))
        )
        return prefix + content


@pytest.fixture(scope="session")
def filler() -> type[Filler]:
    return Filler
