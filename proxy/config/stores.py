"""Opens the state that a configuration names, also one that another proxy is about to release."""

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class PresentOwner:
    """The process that has the state now."""

    pid: int
    release: Callable[[Store], None]
    """Has it release the state, of which it gets what is there, and waits for that; what it raises
    is raised."""


def open_store(config: Config, way: Bootstrap, owner: PresentOwner | None = None) -> Store:
    """Open the state. Its `owner` is asked for it when we have seen that we could use it.

    Raises StateError.
    """
    state = config.state
    if state.kind == "kafka":
        return KafkaStore(
            way,
            state.topic,
            timeout_s=config.limits.connect_timeout_s,
            before_taking=owner.release if owner else None,
        )
    if state.kind == "memory":
        if owner is not None:
            owner.release(MemoryStore())
        return MemoryStore()
    if owner is not None:
        owner.release(read_snapshot(state.path, owner.pid))
    opened = open_or_start_empty if state.on_damage == "start_empty" else SqliteStore
    return opened(state.path)
