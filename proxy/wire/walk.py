"""Follow a Fetch response through its bytes without holding it.

Only lengths and counts are read; everything between them is skipped, so that record data can go
from socket to socket unseen. What is looked for is the tag section at the end of the body: from
version 16 on it may carry broker addresses (KIP-951). An observer is also told what the response
says of each partition.
"""

from proxy.wire.apis import ADDRESS_APIS, APIS, FETCH
from proxy.wire.errors import MalformedResponse
from proxy.wire.steps import NULL, FetchObserver, Step, Telling, body_program
from proxy.wire.varint import MAX_UVARINT_BYTES, Buffer, read_tags, read_uvarint, write_uvarint

__all__ = ["FILLER_TAGS", "FetchObserver", "FetchWalker", "MalformedResponse", "neutral_tail"]

FILLER_TAGS = (2**14 - 1, 2**21 - 1)
"""Numbers of the tagged field that fills the place of a removed one; clients skip numbers that they
do not know (KIP-482). Kafka counts up from 0, so these are far off. The first takes two bytes, the
second three: where one cannot make up a length in shortest form, the other can."""

_NODE_ENDPOINTS_TAG = 0


class FetchWalker:
    """Reads a Fetch response's body piece by piece, holding a few bytes and one entry per level.

    With an observer it also holds one topic's name, and copies of the fields that are told.
    """

    __slots__ = (
        *("_has_endpoints", "_partial", "_skip", "_stack", "_tagged", "_telling"),
        "remaining_bytes",
    )

    remaining_bytes: int
    """Of the body, behind what was fed and skipped. At the tail: the length of the tail."""

    def __init__(
        self, version: int, body_bytes: int, observer: FetchObserver | None = None
    ) -> None:
        """Start at a body of this length: what the frame has behind its header.

        Raises ValueError for a version that the schemas do not know.
        """
        if not 0 <= version <= APIS[FETCH].max_version:
            raise ValueError(f"no schema for Fetch version {version}")
        self._has_endpoints = version >= ADDRESS_APIS[FETCH]
        program, self._tagged = body_program(version, observer is not None)
        self.remaining_bytes = body_bytes
        self._telling = Telling(observer) if observer is not None else None
        self._stack: list[tuple[tuple[Step, ...], int, int]] = [(program, 0, 1)]
        self._skip = 0
        self._partial = b""

    @property
    def opaque_bytes(self) -> int:
        """How many of the next bytes need not be shown and may be passed over with `skip`."""
        return self._skip

    @property
    def at_tail(self) -> bool:
        """Whether the next byte is the first of the body's own tag section.

        Never so before version 12, which has no tag sections.
        """
        return self._tagged and not self._stack and not self._skip

    @property
    def is_done(self) -> bool:
        """Whether all that is left may pass unread: nothing to be told, nor any address, is in it.

        May be False to the end, as after a last topic without partitions.
        """
        telling = self._telling
        return (
            telling is not None
            and telling.told
            and not self._has_endpoints
            and all(index and times == 1 for _, index, times in self._stack)
        )

    def skip(self, count: int) -> None:
        """Pass over `count` bytes, at most `opaque_bytes`, that were moved unseen."""
        if not 0 <= count <= self._skip:
            raise ValueError(f"cannot skip {count} of {self._skip} bytes")
        self._skip -= count
        self.remaining_bytes -= count
        if not self._stack and not self._skip:
            self._check_end(self.remaining_bytes)

    def feed(self, data: Buffer) -> int:
        """Take the next bytes of the body, in pieces of any size.

        Returns how many were taken: all of them, or those before the tail. Opaque bytes may be
        among them. Raises MalformedResponse, after which the walker is of no more use.
        """
        held = len(self._partial)
        if held:
            data = self._partial + bytes(data)
            self._partial = b""
            self.remaining_bytes += held
        taken = self._run(data, min(len(data), self.remaining_bytes))
        self.remaining_bytes -= taken
        return taken - held

    def _run(self, data: Buffer, end: int) -> int:
        """Follow the program through `data[:end]` and return how many bytes were used or kept."""
        pos = 0
        skip = self._skip
        stack = self._stack
        left = self.remaining_bytes
        telling = self._telling
        while True:
            pos += skip
            if pos > end:
                self._skip = pos - end
                return end
            if not stack:
                self._skip = 0
                self._check_end(left - pos)
                return pos
            program, index, times = stack[-1]
            step = program[index]
            skip = step.skip_bytes
            inner = None
            if not skip:
                found = step.read(telling, data, pos, end, left)
                if found is None:
                    return self._keep(data, pos, end)
                number, pos = found
                inner = step.program
                if number < NULL or (number > left - pos and inner != ()):
                    raise MalformedResponse(f"a length of {number} with {left - pos} bytes left")
                if inner is None:
                    skip = max(number, 0)
            if skip > left - pos:
                raise MalformedResponse(f"a field of {skip} bytes with {left - pos} left")
            if index + 1 < len(program):
                stack[-1] = (program, index + 1, times)
            elif times > 1:
                stack[-1] = (program, 0, times - 1)
            else:
                stack.pop()
            if inner and number > 0:
                stack.append((inner, 0, number))

    def _keep(self, data: Buffer, pos: int, end: int) -> int:
        """Hold the start of a field until the rest comes."""
        if end == self.remaining_bytes:
            raise MalformedResponse("the response ends inside a field")
        self._skip = 0
        self._partial = bytes(data[pos:end])
        return end

    def _check_end(self, left: int) -> None:
        """Check what is left behind the last field: a tag section, or nothing."""
        if self._tagged != (left > 0):
            raise MalformedResponse(f"{left} bytes behind the last field")


def neutral_tail(tail: bytes) -> bytes:
    """Return a Fetch response's own tag section without node endpoints, at the same length.

    The length must not change because the frame's length was sent before. In the place of the
    endpoints comes a field of zeros that clients do not know; they learn the new leader from
    Metadata. A section without endpoints is returned as the same object. Raises MalformedResponse.
    """
    try:
        tags, end = read_tags(tail, 0)
        _, start = read_uvarint(tail, 0)
    except (IndexError, ValueError) as error:
        raise MalformedResponse(f"the last tag section: {error}") from None
    if end != len(tail):
        raise MalformedResponse(f"{len(tail) - end} bytes behind the last tag section")
    if all(tag.number != _NODE_ENDPOINTS_TAG for tag in tags):
        return tail
    kept = [tail[:start]]
    fillers: list[bytes] = []
    for tag in tags:
        if tag.number == _NODE_ENDPOINTS_TAG:
            fillers.append(_filler(tag.end - start))
        else:
            kept.append(tail[start : tag.end])
        start = tag.end
    return b"".join(kept + fillers)  # the numbers of a section go up, so fillers come last


def _filler(size: int) -> bytes:
    """Return a tagged field of exactly `size` bytes."""
    for number in map(write_uvarint, FILLER_TAGS):
        room = size - len(number)
        for size_bytes in range(1, MAX_UVARINT_BYTES + 1):
            value_bytes = room - size_bytes
            if value_bytes < 0:
                break
            prefix = write_uvarint(value_bytes)
            if len(prefix) == size_bytes:
                return number + prefix + bytes(value_bytes)
    raise MalformedResponse(f"node endpoints in {size} bytes")
