"""The state of a machine as one of its workers has it: each call goes to the supervisor's store.

The calls block, as those of a file do: reads at the start and what operators change come from the
event loop, all that is written often from a thread (StateWriter). So this has a socket of its own,
beside the channel that the event loop serves, and a lock.
"""

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from threading import Lock
from typing import Any, Protocol

from proxy.state import Record, StateError, Store

from .state_frames import STATE_PIECE_BYTES, FrameError, FrameSocket

CALL_TIMEOUT_S = 10.0
"""How long one call may take, of which a large read or write has several."""

KeptRow = tuple[str, str, int]
"""Key, text and version of a record."""


class Transport(Protocol):
    """Calls the supervisor, for any thread."""

    def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """Return what a method returns.

        Raises StateError as the method did, or when there is no answer in time.
        """

    def close(self) -> None:
        """Call no more."""


class SocketTransport:
    """Calls over a socket, one after the other; `StateServer.serve` is at its other end."""

    def __init__(self, sock: socket.socket, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._frames = FrameSocket(sock, timeout_s)
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._numbers = count(1)

    def call(self, method: str, params: Mapping[str, Any]) -> Any:
        """See Transport."""
        if not self._lock.acquire(timeout=self._timeout_s):
            raise self._late(method)
        try:
            number = next(self._numbers)
            self._frames.send({"id": number, "method": method, "params": params})
            while (answer := self._frames.receive())["id"] != number:
                pass  # of a call that was given up
        except TimeoutError:
            raise self._late(method) from None
        except (OSError, FrameError) as error:
            what = f"the supervisor, which has the state, cannot be reached: {error}"
            raise StateError(what, "restart quota-proxy, if it does not do so itself") from error
        finally:
            self._lock.release()
        if "problem" in answer:
            raise StateError(**answer["problem"])
        return answer["result"]

    def close(self) -> None:
        """See Transport."""
        self._frames.close()

    def _late(self, method: str) -> StateError:
        return StateError(
            f"the supervisor did not answer in {self._timeout_s:g} s ({method}); "
            "what was to be written may be kept all the same",
            "look at the disk of the state, and at the processor time of the supervisor",
        )


class MachineStore(Store):
    """The state of the machine, for one of its workers; see Store."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._closed = False

    def get(self, key: str) -> Record | None:
        """Return the record of that key, or None."""
        row = self._call("get", key=key)
        return None if row is None else Record(*row)

    def items(self, prefix: str) -> list[Record]:
        """Return the records whose key begins with `prefix`, sorted by key; as of one moment."""
        piece = self._call("items", prefix=prefix)
        records = [Record(*row) for row in piece["rows"]]
        while piece["reading"] is not None:
            piece = self._call("more", reading=piece["reading"])
            records += [Record(*row) for row in piece["rows"]]
        return records

    def put_many(self, records: Iterable[Record], *, delete: Iterable[str] = ()) -> int:
        """Delete keys and write records, all or nothing; return how many were deleted."""
        writing: int | None = None
        *first, last = pieces([(each.key, each.text, each.version) for each in records])
        *gone_first, gone_last = pieces([(key, "", 0) for key in delete])
        for rows, gone in [*((rows, ()) for rows in first), *(((), gone) for gone in gone_first)]:
            keys = [key for key, _, _ in gone]
            writing = self._call("stage", writing=writing, rows=rows, delete=keys)
        keys = [key for key, _, _ in gone_last]
        deleted = self._call("put_many", writing=writing, rows=last, delete=keys)
        return int(deleted)

    def close(self) -> None:
        """Use the state no more, which stays open for others, as does the way to it."""
        self._closed = True

    def _call(self, method: str, **params: Any) -> Any:
        if self._closed:
            raise RuntimeError("the state is closed")
        return self._transport.call(method, params)


def pieces(rows: Sequence[KeptRow]) -> Iterator[Sequence[KeptRow]]:
    """Cut rows into pieces of some STATE_PIECE_BYTES: at least one, each of at least one row."""
    start = size = 0
    for position, (key, text, _) in enumerate(rows):
        added = len(key) + len(text)
        if size and size + added > STATE_PIECE_BYTES:
            yield rows[start:position]
            start, size = position, 0
        size += added
    yield rows[start:]
