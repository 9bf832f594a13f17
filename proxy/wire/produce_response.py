"""Recognise a response to Produce that differs from an earlier one in its offsets and times only.

From version 10 on such a response may name brokers (KIP-951), so it has to be read to its end. A
producer's responses are alike: those that equal, but for numbers, one that named none name none.
"""

from proxy.wire.apis import PRODUCE, RESPONSE_HEADER_BYTES
from proxy.wire.frames import response_body
from proxy.wire.layout import RecordLayout, response_layout
from proxy.wire.rewrite import unreadable_is_malformed

MAX_SHAPES = 16
"""So many are remembered."""

MAX_SHAPE_BYTES = 4096
"""Longer responses are read each time."""

NO_TAGS = b"\0"

_NUMBERS = frozenset({"base_offset", "log_append_time_ms", "log_start_offset"})


class ProduceResponseShapes:
    """The responses on one connection that named no broker."""

    __slots__ = ("_by_version",)

    def __init__(self) -> None:
        self._by_version: dict[int, list[tuple[bytes, bytes]]] = {}

    def knows(self, version: int, frame: memoryview) -> bool:
        """Return whether a whole response is like one that named no broker."""
        number = int.from_bytes(frame, "big")
        return any(
            len(mask) == len(frame)
            and number & int.from_bytes(mask, "big") == int.from_bytes(content, "big")
            for mask, content in self._by_version.get(version, ())
        )

    def learn(self, version: int, frame: bytes) -> None:
        """Remember a whole response if it names no broker. Raises MalformedResponse."""
        room = MAX_SHAPES - sum(map(len, self._by_version.values()))
        if not room or len(frame) > MAX_SHAPE_BYTES or self.knows(version, memoryview(frame)):
            return
        mask = bytearray(b"\xff" * len(frame))
        mask[:RESPONSE_HEADER_BYTES] = bytes(RESPONSE_HEADER_BYTES)
        with unreadable_is_malformed():
            layout = response_layout(PRODUCE, version)
            pos = response_body(PRODUCE, version, frame)
            if frame[layout.seek(None, frame, pos) :] != NO_TAGS:
                return
            for start, end in _number_spans(layout, frame, pos):
                mask[start:end] = bytes(end - start)
        content = bytes(each & kept for each, kept in zip(frame, mask, strict=True))
        self.pairs(version).append((bytes(mask), content))

    def pairs(self, version: int) -> list[tuple[bytes, bytes]]:
        """Return the masks of a version without the numbers, each with what is left under it.

        The list grows, to MAX_SHAPES at most.
        """
        return self._by_version.setdefault(version, [])


def _number_spans(layout: RecordLayout, frame: bytes, pos: int) -> list[tuple[int, int]]:
    """Return where the numbers of a response body are that change from one to the next."""
    found = [layout.spans(frame, pos)[0]["throttle_time_ms"]]
    topics = layout.fields["responses"]
    partitions = topics.element.fields["partition_responses"]
    count, pos = topics.count(frame, layout.seek("responses", frame, pos))
    for _ in range(count):
        spans, end = topics.element.spans(frame, pos)
        inner, pos = partitions.count(frame, spans["partition_responses"][0])
        for _ in range(inner):
            fields, pos = partitions.element.spans(frame, pos)
            found += [span for name, span in fields.items() if name in _NUMBERS]
        pos = end
    return found
