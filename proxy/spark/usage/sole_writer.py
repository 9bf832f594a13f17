"""Lets one query at a time write to a folder: a file in it is written anew while the query runs."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from threading import Thread
from uuid import uuid4

from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from .command_line import UsageInputError
from .record_frames import find_path

WRITERS_FOLDER = "writers"
BEAT_S, DEAD_AFTER_S = 3, 15
"""How often a query writes its file; for how long after that it is taken for alive."""


class SoleWriter:
    """The right to write below a folder: `take` it, check that it `is_held`, and `keep` it."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self._folder = folder
        parent = f"{folder}/{WRITERS_FOLDER}"
        self._parent, self._files = find_path(spark, parent)
        own = f"{parent}/{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:8]}"
        self._own, _ = find_path(spark, own)

    def take(self) -> None:
        """Wait until who has died is known to be dead. Raises UsageInputError if one lives."""
        first = self._touch()
        while True:
            now = self._touch()
            own = now.pop(self._own.getName())
            alive = [name for name, time_ms in now.items() if first.get(name) != time_ms]
            if alive:
                self._files.delete(self._own, False)
                raise UsageInputError(
                    f"{self._folder}: another query writes to it ({alive[0]}), and two would store "
                    "records twice; fix: end that one, or name another folder"
                )
            if all(own - time_ms > DEAD_AFTER_S * 1000 for time_ms in now.values()):
                break
            time.sleep(BEAT_S)
        for name in now:
            self._files.delete(self._parent.suffix(f"/{name}"), False)

    def is_held(self) -> bool:
        """Return whether no other query took this one for dead."""
        return bool(self._files.exists(self._own))

    def keep(self, query: StreamingQuery) -> None:
        """Keep the right, in a thread, until a query ends."""
        Thread(target=self._beat, args=(query,), daemon=True, name="keep usage folder").start()

    def _beat(self, query: StreamingQuery) -> None:
        with suppress(Exception):  # the process ends
            while query.isActive:
                with suppress(Exception):  # the query fails, or for now the file system does
                    if not query.awaitTermination(BEAT_S) and self.is_held():
                        self._touch()
            self._files.delete(self._own, False)

    def _touch(self) -> dict[str, int]:
        """Write the own file; return when each was written, by the clock of the file system."""
        self._files.create(self._own, True).close()
        found = self._files.listStatus(self._parent)
        return {each.getPath().getName(): each.getModificationTime() for each in found}
