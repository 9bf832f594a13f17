"""Tells by their bytes that Fetches read on, each from where the one before ended."""

from struct import Struct

from proxy.wire.apis import FETCH
from proxy.wire.fetch import FetchedPartition
from proxy.wire.fetch_response import fetch_form
from proxy.wire.layout import UNREADABLE, request_layout, request_partitions

_LENGTH_AND_NUMBER_BYTES = 8  # of a response: what is in front of all that is the same
_REQUEST_START_BYTES = 12  # length, API key, version, correlation id
_EPOCH_BYTES, _OFFSET_BYTES = 4, 8
_INDEX, _ERROR, _END = 0, 1, -1  # in a FetchedPartition

NO_FRAMES = b"", b""


class FetchRun:
    """Fetches in a row that got records of the same partition, and nothing else.

    One was read before; the bytes of the others are the same, but for correlation ids, the epochs
    of a session, offsets, the records and what is said of the log. So nothing else is read of them.
    """

    __slots__ = (
        *("_end", "_in_session", "_index", "_prefix", "_read_rows", "_request", "_row_at", "_same"),
        *("_tail", "latest", "passed_bytes", "start"),
    )

    def __init__(
        self, version: int, request: bytes, request_at: int, response: bytes, response_at: int
    ) -> None:
        """Take frames that were read, whose bodies are there, as what those of a run are like.

        Raises ValueError where no run is like them, as with versions before 13.
        """
        self.start = 0
        """The offset from which the first one of the run asks."""
        self.latest = NO_FRAMES
        """Request and response of the last one."""
        self.passed_bytes = 0
        """Of the responses before that."""
        body, answer = memoryview(request)[request_at:], memoryview(response)[response_at:]
        form, layout = fetch_form(version), request_layout(FETCH, version)
        fields = request_partitions(FETCH, version, "partition", "fetch_offset")
        row = fields.known.find(body, layout.head().size)
        if form.read_rows is None or not form.topic_bytes or row is None:
            raise ValueError("a version, or a request, that is not like most")
        topic, place, (self._index, self._end) = row
        offset_at = place + fields.partition.seek("fetch_offset", b"", 0)
        epoch_at = layout.seek("session_epoch", b"", 0)
        head_bytes = request_at + epoch_at - _REQUEST_START_BYTES
        middle_bytes = offset_at - epoch_at - _EPOCH_BYTES
        rest_bytes = len(body) - offset_at - _OFFSET_BYTES
        self._request = Struct(f">8s4x{head_bytes}si{middle_bytes}sq{rest_bytes}s")
        begin, head, epoch, middle, _, rest = self._request.unpack(request)
        self._in_session, self._same = epoch > 0, (begin, head, middle, rest)
        self._read_rows = form.read_rows
        topics, topic_at = form.read_count(answer, form.session.size)
        topic_end = topic_at + form.topic_bytes
        partitions, row_at = form.read_count(answer, topic_end)
        self._row_at = response_at + row_at
        self._prefix = response[_LENGTH_AND_NUMBER_BYTES : self._row_at]
        end = self._row_end(response)
        session = 0, *layout.head("session_id").unpack_from(body)
        is_alone = topics == partitions == 1 and answer[topic_at:topic_end] == topic
        if end is None or not is_alone or session != form.session.unpack_from(answer):
            raise ValueError("another answer than records")
        self._tail = response[end:]

    def begins(self, request: bytes, response: bytes) -> bool:
        """Begin with a Fetch and its response, of whole frames, if they are as the one before."""
        if not self._takes(request, response, None):
            return False
        self.passed_bytes = 0
        return True

    def goes_on(self, request: bytes, response: bytes) -> bool:
        """Take the next one if it reads on; return whether it does."""
        passed_bytes = len(self.latest[1])
        if not self._takes(request, response, self._end):
            return False
        self.passed_bytes += passed_bytes
        return True

    def _takes(self, request: bytes, response: bytes, start: int | None) -> bool:
        if len(request) != self._request.size:
            return False
        begin, head, epoch, middle, offset, rest = self._request.unpack(request)
        if (
            (begin, head, middle, rest) != self._same
            or (epoch > 0) is not self._in_session
            or response[_LENGTH_AND_NUMBER_BYTES : self._row_at] != self._prefix
        ):
            return False
        if start is None:
            self.start = self._end = offset
        elif offset != start:
            return False
        end = self._row_end(response)
        if end is None or response[end:] != self._tail:
            return False
        self.latest = request, response
        return True

    def _row_end(self, response: bytes) -> int | None:
        """Return where the partition ends if it has records, up to which the run goes then."""
        rows: list[FetchedPartition] = []
        size = len(response)
        try:
            _, at = self._read_rows(response, self._row_at, size, size, 1, rows)
        except UNREADABLE:
            return None
        if not rows:
            return None
        row = rows[0]
        end = row[_END]
        if row[_INDEX] != self._index or row[_ERROR] or end is None or end <= self._end:
            return None
        self._end = end
        return at
