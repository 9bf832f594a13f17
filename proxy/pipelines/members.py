"""Who belongs to a stage: the clients of its queries, as far as they are known, and its own."""

from proxy.pipeline.graph import StageSettings
from proxy.progress.query_registry import QueryRegistry

from .line import Line


class Members:
    """Finds stages by client and clients by stage.

    Args:
        registry: knows which client a query reads with.

    """

    def __init__(self, registry: QueryRegistry) -> None:
        self._registry = registry

    def stage_of(self, line: Line, client_id: str) -> StageSettings | None:
        """Return the stage that a client belongs to; None when to none of this pipeline."""
        stage = line.members.get(client_id)
        if stage is None:
            query = self._registry.query_of(client_id)
            stage = line.members.get(query.name) if query is not None else None
        return stage

    def clients_of(self, stage: StageSettings) -> set[str]:
        """Return the client ids of a stage, as far as its queries are known."""
        clients = set(stage.client_ids)
        for member in stage.members:
            if self._registry.query_of(member) is not None:
                clients.add(member)
            query = self._registry.query_named(member)
            if query is not None:
                clients.add(query.client_id)
        return clients
