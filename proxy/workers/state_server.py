"""Serves the state of a machine to its workers; each has a connection, and a thread here."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from structlog import get_logger

from proxy.state import Record, StateError, Store

from .machine_store import KeptRow, pieces
from .state_frames import FrameError, FrameSocket

MAX_UNDER_WAY = 16
"""Reads, and writes, in pieces on one connection: a worker has fewer threads that use the state. Of
more the oldest is given up."""

_log = get_logger(__name__)


class StateServer:
    """Calls the methods of a store for workers; the store may be used from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def use(self, store: Store) -> None:
        """Serve another store from now on, after a take-over."""
        self._store = store

    def serve(self, sock: socket.socket) -> None:
        """Serve one worker until it, or this side, closes the connection. Run it in a thread.

        What a worker has asked for before it died is done. The socket is closed then.
        """
        frames = FrameSocket(sock, None)
        calls = StateCalls(lambda: self._store)
        try:
            while True:
                asked = frames.receive()
                frames.send({"id": asked["id"], **calls.answer(asked["method"], asked["params"])})
        except (FrameError, OSError):
            pass  # it has gone
        finally:
            frames.close()


class StateCalls:
    """The calls of one worker: what it reads and writes in pieces is kept here between two."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._numbers = count(1)
        self._readings: dict[int, Iterator[Sequence[KeptRow]]] = {}
        self._writings: dict[int, tuple[list[KeptRow], list[str]]] = {}
        self._methods: dict[str, Callable[..., Any]] = {
            "get": self._get,
            "items": self._items,
            "more": self._more,
            "stage": self._stage,
            "put_many": self._put_many,
        }

    def answer(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a method returns as `result`, or why it failed as `problem`."""
        try:
            return {"result": self._methods[method](**params)}
        except StateError as error:
            problem = {"what": error.what, "fix": error.fix}
        except RuntimeError as error:  # closed
            problem = {"what": f"the state is not open: {error}", "fix": "try it again"}
        except Exception as error:  # a defect of ours must not end the worker's state
            _log.error("unexpected error about the state", method=method, exc_info=error)
            problem = {"what": f"the state failed: {error!r}", "fix": "report this error"}
        return {"problem": problem}

    def _get(self, key: str) -> KeptRow | None:
        record = self._store().get(key)
        return None if record is None else _row(record)

    def _items(self, prefix: str) -> dict[str, Any]:
        rows = [_row(record) for record in self._store().items(prefix)]
        return self._next_piece(next(self._numbers), pieces(rows))

    def _more(self, reading: int) -> dict[str, Any]:
        if reading not in self._readings:
            text = f"more than {MAX_UNDER_WAY} reads of the state are under way"
            raise StateError(text, "read it again")
        return self._next_piece(reading, self._readings.pop(reading))

    def _next_piece(self, reading: int, left: Iterator[Sequence[KeptRow]]) -> dict[str, Any]:
        rows = next(left, ())
        following = next(left, None)
        if following is None:
            return {"rows": rows, "reading": None}
        _make_room(self._readings)
        self._readings[reading] = _chained(following, left)
        return {"rows": rows, "reading": reading}

    def _stage(self, writing: int | None, rows: list[KeptRow], delete: list[str]) -> int:
        if writing is None:
            writing = next(self._numbers)
            _make_room(self._writings)
            self._writings[writing] = [], []
        elif writing not in self._writings:
            raise _given_up()
        staged, gone = self._writings[writing]
        staged += rows
        gone += delete
        return writing

    def _put_many(self, writing: int | None, rows: list[KeptRow], delete: list[str]) -> int:
        staged: list[KeptRow] = []
        gone: list[str] = []
        if writing is not None:
            if writing not in self._writings:
                raise _given_up()
            staged, gone = self._writings.pop(writing)
        records = [Record(*row) for row in (*staged, *rows)]
        return self._store().put_many(records, delete=[*gone, *delete])


def _chained(
    first: Sequence[KeptRow], left: Iterator[Sequence[KeptRow]]
) -> Iterator[Sequence[KeptRow]]:
    yield first
    yield from left


def _given_up() -> StateError:
    text = f"more than {MAX_UNDER_WAY} writes to the state are under way"
    return StateError(text, "write it again")


def _make_room(under_way: dict[int, Any]) -> None:
    while len(under_way) >= MAX_UNDER_WAY:
        del under_way[next(iter(under_way))]


def _row(record: Record) -> KeptRow:
    return record.key, record.text, record.version
