"""When the state of pipelines is written and read again."""

from pipeline_parts import SECOND_MS, source, stage

from proxy.pipeline.graph import PipelineSettings
from proxy.pipeline.pipeline_state import REAPPLY_MS, PipelineState
from proxy.pipeline.running_pipeline import RunningPipeline
from proxy.progress.query import ProgressSettings
from proxy.progress.query_registry import QueryRegistry
from proxy.state import MemoryStore, Record

START_S = 1_700_000_000.0
HELD = {
    "pipeline": "p",
    "node": "one",
    "rate": 400.0,
    "t_delay_ms": 1.5,
    "since_s": START_S,
    "why": "two asks for less",
    "by": "two",
    "direction": "decrease",
    "holders": ["two"],
    "revision": 3,
}


def make() -> RunningPipeline:
    registry = QueryRegistry(
        ProgressSettings(queries=(), max_queries=10), lambda _: True, lambda _: None
    )
    settings = PipelineSettings(
        name="p",
        stages=(stage("one", "a", "b"), stage("two", "b")),
        sources=(source("app", "a"),),
    )
    return RunningPipeline(settings, registry, 0.0, START_S)


async def test_the_flow_is_read_again_at_a_period():
    now_ms = 0.0
    pipeline, store, state = make(), MemoryStore(), PipelineState(lambda: now_ms)
    state.load(store, [pipeline])
    store.put_many([Record.of("flow/p/one", HELD)])  # another process holds it
    now_ms = REAPPLY_MS - SECOND_MS
    await state.reapply([pipeline])
    assert pipeline.flow.state_of("one") is None
    now_ms = REAPPLY_MS
    await state.reapply([pipeline])
    assert pipeline.flow.state_of("one").rate == 400.0
    store.delete("flow/p/one")  # somebody removed it
    now_ms = 2 * REAPPLY_MS - SECOND_MS
    await state.reapply([pipeline])
    await state.keep([pipeline])
    assert store.get("flow/p/one") is None
    now_ms = 2 * REAPPLY_MS
    await state.reapply([pipeline])
    await state.keep([pipeline])
    assert store.get("flow/p/one").value == HELD
    await state.close()
