"""Clients that share something besides quotas."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientSet:
    """All clients of a pipeline, or of one query."""

    name: str
    """Such as `pipeline:orders`, or a query's client id."""
    client_ids: frozenset[str]
    prefixes: tuple[str, ...] = ()
    """How further client ids of it begin."""
