"""Many stages on virtual time: a slow one holds back all before it, then lets them go.

Of rates alone; for the batches that are planned, and the bounds on them, see test_bounds.
"""

import random
from dataclasses import dataclass, field

import pytest
from parts.lone_pipeline import lone_pipeline

from proxy.pipeline.graph import (
    PipelineGraph,
    PipelineSettings,
    SourceProducerSettings,
    StageSettings,
)
from proxy.pipeline.running_pipeline import RunningPipeline

CHAINED, STAGES = 300, 1_000
SECOND_MS = 1_000.0
NORMAL = 100.0
"""Records/s in every topic while nobody is held."""
FAST, SLOWED = 1.2, 0.4
"""What a stage can process, against its normal rate."""
SLOWED_RATE = NORMAL * SLOWED
STEP = 2.0
MAX_LAG = 800
ALIVE_S = 100
"""How often the stages show that they are alive."""
WATCHED_S = 40
REACH = 40
"""How far back a stage of the random graph looks for its inputs."""


@dataclass(slots=True)
class Plant:
    """Stages that read what waits for them, as fast as they can and may.

    A stage of n inputs writes one record for n, so that every topic carries NORMAL.
    """

    inputs: list[list[int]]
    """For each stage the ones before it that it reads; none: it reads a source of its own."""
    lag: list[float] = field(init=False)
    received: list[float] = field(init=False)
    capacity: list[float] = field(init=False)
    bound: list[float] = field(init=False)
    produced: list[float] = field(init=False)
    source_bound: dict[int, float] = field(init=False)
    source_total: dict[int, float] = field(init=False)
    slow_band: bool = False
    """Whether the slow stage is to be sent no more than it can process then."""
    seconds: int = 0
    most_lag: float = 0.0
    """The most that ever waited for a stage."""

    def __post_init__(self) -> None:
        count = len(self.inputs)
        self.lag, self.received, self.produced = [0.0] * count, [0.0] * count, [0.0] * count
        self.capacity = [NORMAL * self.width(stage) * FAST for stage in range(count)]
        self.bound = [float("inf")] * count
        sources = [stage for stage, inputs in enumerate(self.inputs) if not inputs]
        self.source_bound = dict.fromkeys(sources, float("inf"))
        self.source_total = dict.fromkeys(sources, 0.0)

    @property
    def middle(self) -> int:
        """The stage that is slowed down."""
        return len(self.inputs) // 2

    def width(self, stage: int) -> int:
        return len(self.inputs[stage]) or 1

    def band(self, stage: int) -> tuple[float, float]:
        share = SLOWED if self.slow_band and stage == self.middle else 1.0
        rate = NORMAL * self.width(stage) * share
        return 0.85 * rate, 1.25 * rate

    def slow(self, flow: RunningPipeline, *, is_slow: bool) -> None:
        """Slow one stage down, with a band to go with that; or let it be as fast as before."""
        self.slow_band = is_slow
        capacity = NORMAL * (SLOWED if is_slow else FAST)
        self.capacity[self.middle] = self.width(self.middle) * capacity
        self.report(flow)
        flow.reload(PipelineGraph(self.pipeline()), self.seconds * SECOND_MS)

    def pipeline(self) -> PipelineSettings:
        stages = tuple(
            StageSettings(
                name=f"s{stage}",
                consumes=tuple(f"t{feeder}" for feeder in inputs) or (f"in{stage}",),
                produces=(f"t{stage}",),
                band=self.band(stage),
                sampling_interval_ms=SECOND_MS,
                period_ms=SECOND_MS,
                ratio=0.5,
                normal_rate=NORMAL * self.width(stage),
                step=STEP * self.width(stage),
            )
            for stage, inputs in enumerate(self.inputs)
        )
        sources = tuple(
            SourceProducerSettings(
                client_id=f"c{stage}", produces=(f"in{stage}",), normal_rate=NORMAL, step=STEP
            )
            for stage in self.source_total
        )
        return PipelineSettings(
            name="p", stages=stages, sources=sources, hold_producers=True, max_lag=MAX_LAG
        )

    def run(self, flow: RunningPipeline, seconds: int) -> None:
        for _ in range(seconds):
            self.second(flow)

    def second(self, flow: RunningPipeline) -> None:
        if self.seconds % ALIVE_S == 0:
            for stage in range(len(self.inputs)):
                flow.stages[f"s{stage}"].seen(self.seconds * SECOND_MS)
        self.seconds += 1
        now_ms = self.seconds * SECOND_MS
        for stage, inputs in enumerate(self.inputs):
            if inputs:
                arrived = sum(self.produced[feeder] for feeder in inputs)
            else:
                arrived = min(NORMAL, self.source_bound[stage])
                self.source_total[stage] += arrived
                flow.sources[f"c{stage}"].arrived({f"in{stage}": self.source_total[stage]}, now_ms)
            waiting = self.lag[stage] + arrived
            read = min(waiting, self.capacity[stage], self.bound[stage])
            self.lag[stage] = waiting - read
            self.received[stage] += arrived
            self.produced[stage] = read / self.width(stage)
            name = f"s{stage}"
            flow.stages[name].sample(self.received[stage], now_ms)
            flow.stages[name].lag(int(self.lag[stage]))
        self.most_lag = max(self.most_lag, *self.lag)
        flow.tick(now_ms)
        for name, node in flow.nodes.items():
            bound = self.source_bound if name.startswith("c") else self.bound
            bound[int(name[1:])] = float("inf") if node.state.rate is None else node.state.rate

    def report(self, flow: RunningPipeline) -> None:
        """Tell what each stage processes, and how many records it writes for how many."""
        for stage, capacity in enumerate(self.capacity):
            name, width = f"s{stage}", self.width(stage)
            flow.stages[name].processed(capacity, self.seconds * SECOND_MS)
            flow.stages[name].converted(1_000 * width, {f"t{stage}": 1_000})

    def before(self, stage: int) -> set[int]:
        """Return all stages that feed this one, near and far."""
        found: set[int] = set()
        look = list(self.inputs[stage])
        while look:
            feeder = look.pop()
            if feeder not in found:
                found.add(feeder)
                look += self.inputs[feeder]
        return found

    def is_free(self) -> bool:
        return set(self.bound) | set(self.source_bound.values()) == {float("inf")}


def chain() -> Plant:
    return Plant([[stage - 1] if stage else [] for stage in range(CHAINED)])


def random_graph() -> Plant:
    chosen = random.Random(6)
    inputs: list[list[int]] = [[] for _ in range(5)]
    for stage in range(5, STAGES):
        near = range(max(0, stage - REACH), stage)
        inputs.append(sorted(chosen.sample(near, min(len(near), chosen.choice((1, 1, 2))))))
    return Plant(inputs)


CASES = {"chain": (chain, CHAINED // 2 + 20, 700), "random graph": (random_graph, 150, 200)}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "settle_s", "recover_s"), CASES.values(), ids=CASES.keys())
def test_a_slow_stage_holds_back_all_before_it_and_lets_them_go(make, settle_s, recover_s):
    plant = make()
    flow = lone_pipeline(plant.pipeline(), 0.0, 0.0)
    plant.report(flow)
    plant.run(flow, 10)
    assert plant.is_free()

    slow = plant.middle
    width, before = plant.width(slow), plant.before(slow)
    plant.slow(flow, is_slow=True)
    plant.run(flow, settle_s)
    received = plant.received[slow]
    for _ in range(WATCHED_S):
        plant.second(flow)
        # Two steps are 10 % of the rate: nobody before the slow stage strays further from it.
        rates = [plant.produced[stage] for stage in before]
        assert min(rates) >= SLOWED_RATE - 2 * STEP
        assert max(rates) <= SLOWED_RATE + 2 * STEP
    mean = (plant.received[slow] - received) / WATCHED_S
    assert mean == pytest.approx(SLOWED_RATE * width, rel=0.1)

    plant.slow(flow, is_slow=False)
    for _ in range(recover_s):
        plant.second(flow)
        if plant.is_free():
            break
    assert plant.is_free()
    plant.run(flow, 20)
    assert plant.is_free()
    # No batches are planned here: what keeps max_lag is left out, rates alone come near it.
    assert plant.most_lag <= 2 * MAX_LAG
