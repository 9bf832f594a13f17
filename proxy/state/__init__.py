"""State that outlives a restart, behind one interface: in memory, one SQLite file, or a topic.

Who writes now and then calls the store; who writes often, on the event loop, a `StateWriter`.
"""

from .journal import Journal, KeptParts, RecordFormat
from .kafka.kafka_store import KafkaStore
from .kafka.slot_store import SlotStore
from .kafka.slot_table import GroupFence
from .sqlite import SqliteStore, open_or_start_empty, read_snapshot
from .store import Document, Json, MemoryStore, Record, StateError, Store
from .watched import StateWriter, WriteProbe

__all__ = [
    "Document",
    "GroupFence",
    "Journal",
    "Json",
    "KafkaStore",
    "KeptParts",
    "MemoryStore",
    "Record",
    "RecordFormat",
    "SlotStore",
    "SqliteStore",
    "StateError",
    "StateWriter",
    "Store",
    "WriteProbe",
    "open_or_start_empty",
    "read_snapshot",
]
