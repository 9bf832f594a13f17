"""State that outlives a restart, behind one interface: in memory, one SQLite file, or a topic.

Who writes often, on the event loop, has `Store.write`.
"""

from .kafka.kafka_store import KafkaStore
from .kafka.slot_store import SlotStore
from .kafka.slot_table import GroupFence
from .probed_store import ProbedStore
from .sqlite import SqliteStore, open_or_start_empty, read_live_state
from .state_records import JsonDataclass, RecordFormat, UnwrittenRecords
from .store import Document, Json, MemoryStore, Record, StateError, Store

__all__ = [
    "Document",
    "GroupFence",
    "Json",
    "JsonDataclass",
    "KafkaStore",
    "MemoryStore",
    "ProbedStore",
    "Record",
    "RecordFormat",
    "SlotStore",
    "SqliteStore",
    "StateError",
    "Store",
    "UnwrittenRecords",
    "open_or_start_empty",
    "read_live_state",
]
