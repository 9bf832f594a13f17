"""State that outlives a restart, behind one interface: in memory, one SQLite file, or a topic.

Who writes now and then, such as an operator's command, calls the store. Who writes often and runs
on the event loop goes through a `StateWriter`, which puts what came meanwhile into one
transaction.
"""

from .journal import Journal, RecordFormat
from .kafka import KafkaStore
from .sqlite import SqliteStore
from .store import Json, MemoryStore, Record, StateError, Store
from .writer import StateWriter

__all__ = [
    "Journal",
    "Json",
    "KafkaStore",
    "MemoryStore",
    "Record",
    "RecordFormat",
    "SqliteStore",
    "StateError",
    "StateWriter",
    "Store",
]
