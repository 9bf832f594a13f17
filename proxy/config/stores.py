"""Opens the state that a configuration names, and looks at one that another proxy has."""

from proxy.cluster.kafka_client import Bootstrap
from proxy.config.models import Config
from proxy.state import (
    KafkaStore,
    MemoryStore,
    SqliteStore,
    Store,
    open_or_start_empty,
    read_snapshot,
)


def open_store(config: Config, way: Bootstrap) -> Store:
    """Open the state. Raises StateError."""
    state = config.state
    if state.kind == "kafka":
        return KafkaStore(way, state.topic, timeout_s=config.limits.connect_timeout_s)
    if state.kind == "memory":
        return MemoryStore()
    opened = open_or_start_empty if state.on_damage == "start_empty" else SqliteStore
    return opened(state.path)


def read_state(config: Config, way: Bootstrap, owner: int) -> Store:
    """Return what is in the state of process `owner`, which keeps it. Raises StateError."""
    state = config.state
    if state.kind == "kafka":
        timeout_s = config.limits.connect_timeout_s
        return KafkaStore(way, state.topic, timeout_s=timeout_s, takes=False)
    return MemoryStore() if state.kind == "memory" else read_snapshot(state.path, owner)
