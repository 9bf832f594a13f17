"""What a valid configuration of pipelines lacks to do what it says."""

from collections.abc import Iterator

from proxy.config.models import Config
from proxy.config.pipeline_models import PipelineSection
from proxy.pipeline.graph import PipelineGraph, StageSettings, find_endless
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rules import Rule, RuleTable


def find_advice(config: Config, table: RuleTable) -> Iterator[str]:
    """Yield a line for each thing that is not wrong and hardly what is wanted."""
    yield from find_unheld(config, table)
    for pipeline in config.pipelines:
        yield from find_endless(pipeline.settings)


def find_unheld(config: Config, table: RuleTable) -> Iterator[str]:
    """Yield a line for each node that may have to wait, and that no rule lets be held."""
    for pipeline in config.pipelines:
        graph = PipelineGraph(pipeline.settings)
        for stage in graph.stages.values():
            if _may_wait(pipeline, graph, stage):
                for client_id in _clients(config, stage):
                    rules = _rules(config, table, QuotaKind.CONSUMER_BYTE_RATE, client_id)
                    if not any(rule.adaptive for rule in rules):
                        lack = "consumer_byte_rate and adaptive"
                        yield _line(pipeline, f"stage {stage.name!r}", client_id, lack)
        for source in pipeline.settings.sources if pipeline.settings.hold_producers else ():
            if not list(_rules(config, table, QuotaKind.PRODUCER_BYTE_RATE, source.client_id)):
                lack = "producer_byte_rate"
                yield _line(pipeline, f"source {source.client_id!r}", source.client_id, lack)


def _may_wait(pipeline: PipelineSection, graph: PipelineGraph, stage: StageSettings) -> bool:
    settings = pipeline.settings
    has_limit = (settings.max_pending_batches or settings.max_pending_bytes) is not None
    return bool(graph.downstream_of(stage.name)) or (has_limit and stage.name in graph.first)


def _clients(config: Config, stage: StageSettings) -> list[str]:
    """Return the client ids of a stage, as the configuration knows them."""
    queries = {query.name: query.client_id for query in config.queries}
    return [queries.get(member, member) for member in stage.members]


def _rules(config: Config, table: RuleTable, kind: QuotaKind, client_id: str) -> Iterator[Rule]:
    """Yield the rules that bound a client, whoever its user is and wherever it comes in."""
    users = {None, *(rule.user for rule in config.quotas.rules)}
    for listener in config.listeners:
        for user in users:
            match = table.match(kind, ClientIdentity(listener.name, user, client_id))
            if match is not None:
                yield match.rule


def _line(pipeline: PipelineSection, node: str, client_id: str, lack: str) -> str:
    return (
        f"pipeline {pipeline.name!r}: {node} cannot be held, no rule gives client-id "
        f"{client_id!r} a {lack}"
    )
