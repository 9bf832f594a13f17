"""Opens the state that a configuration names, or looks at one that another proxy has."""

from proxy.cluster.kafka_client import Bootstrap
from proxy.config.models import Config
from proxy.state import (
    KafkaStore,
    MemoryStore,
    SqliteStore,
    Store,
    open_or_start_empty,
    read_live_state,
)


def open_store(config: Config, way: Bootstrap, owner: int | None = None) -> Store:
    """Open the state, or what is in that of process `owner`, which keeps it. Raises StateError."""
    state = config.state
    if state.kind == "kafka":
        timeout_s = config.limits.connect_timeout_s
        return KafkaStore(way, state.topic, timeout_s=timeout_s, looks=owner is not None)
    if state.kind == "memory":
        return MemoryStore()
    if owner is not None:
        return read_live_state(state.path, owner)
    opened = open_or_start_empty if state.on_damage == "start_empty" else SqliteStore
    return opened(state.path)
