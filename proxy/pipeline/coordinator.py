"""Of several requests to one node in a period, apply the one that changes its rate most.

The largest delay wins, so a request to decrease beats any to increase. The others are dropped;
who asked to decrease is remembered all the same: it holds the node too, and the rate goes up only
when every stage that holds the node asks for it. Of these requests the smallest step is applied.

A stage that is gone or silent has no say. When no other stage holds the node, it is released
step by step, one step in a period: nothing stays held for somebody who no longer reads.

The period of a node is the longest one of the stages that consume from it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from proxy.state import Record, StateError

from .controller import RECORD_VERSION, Change, Controller, Request, from_record, record_key
from .graph import PipelineGraph
from .trigger import Direction

NOBODY_LEFT = "no stage that asked to hold it back is alive"


@dataclass(frozen=True, slots=True)
class Decision:
    """That the state of a node is different now."""

    node: str
    ended_for: tuple[str, ...]
    """The stages to be told that control has ended; empty when it has not."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of reading the state."""

    refused: list[str]
    """What was not taken up, and why; for people."""
    to_write: set[str]
    """Nodes whose records are to be written anew, or deleted when they are not held."""
    to_delete: list[str]
    """Keys of records of nodes that are gone."""


@dataclass(slots=True)
class _Window:
    """The period of one node, and the largest request of each stage in it."""

    period_ms: float
    due_ms: float
    requests: dict[str, Change]


class Coordinator:
    """The controllers of a pipeline, and the requests of the present period."""

    def __init__(self, graph: PipelineGraph, now_ms: float) -> None:
        self.controllers: dict[str, Controller] = {}
        """By name of the node."""
        self._windows: dict[str, _Window] = {}
        self.update(graph, now_ms)

    def update(self, graph: PipelineGraph, now_ms: float) -> tuple[set[str], dict[str, Controller]]:
        """Follow a changed pipeline; nodes that remain keep their state.

        Returns:
            the nodes whose state is different now, and the controllers of the nodes that are gone.

        """
        changed = set()
        gone = self.controllers
        self.controllers = {}
        windows, self._windows = self._windows, {}
        for name, node in graph.nodes.items():
            controller = gone.get(name)
            consumers = graph.downstream_of(name)
            if controller is None or controller.node.is_source != node.is_source:
                controller = Controller(node)
            else:
                del gone[name]
                if controller.adjust(node, consumers):
                    changed.add(name)
            self.controllers[name] = controller
            # A stage that nobody consumes from any more may still have to be released.
            period_ms = max(graph.stages[stage].period_ms for stage in consumers or (name,))
            window = windows.get(name)
            if window is None or window.period_ms != period_ms:
                window = _Window(period_ms, now_ms + period_ms, {})
            window.requests.clear()
            self._windows[name] = window
        return changed, gone

    def gather(self, request: Request) -> None:
        """Take a request; of two of a stage in one period the larger one counts.

        Raises KeyError when there is no such node.
        """
        change = self.controllers[request.node].weigh(request)
        requests = self._windows[request.node].requests
        earlier = requests.get(request.stage)
        if earlier is None or earlier.t_delay_ms <= change.t_delay_ms:
            requests[request.stage] = change

    def tick(self, now_ms: float, now_s: float, is_alive: Callable[[str], bool]) -> list[Decision]:
        """End the periods that are due, and apply at most one request to each of their nodes.

        Args:
            now_ms: the time.
            now_s: wall clock.
            is_alive: whether a stage has a say.

        """
        decisions = []
        for name, window in self._windows.items():
            if now_ms < window.due_ms:
                continue
            missed = (now_ms - window.due_ms) // window.period_ms
            window.due_ms += window.period_ms * (1 + missed)
            decision = self._decide(name, window, now_s, is_alive)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def load(self, pipeline: str, records: Iterable[Record], graph: PipelineGraph) -> Loaded:
        """Take up the states that are later than those here.

        Args:
            pipeline: its name.
            records: all of them; a node without one counts as one whose record was lost.
            graph: the pipeline as it is.

        """
        loaded = Loaded([], set(), [])
        names = {record_key(pipeline, name): name for name in self.controllers}
        missing = {name for name, item in self.controllers.items() if item.state.rate is not None}
        for record in records:
            name = names.get(record.key)
            if name is None:
                loaded.refused.append(f"{record.key}: the pipeline has no such node; deleted")
                loaded.to_delete.append(record.key)
                continue
            missing.discard(name)
            controller = self.controllers[name]
            if record.version != RECORD_VERSION:
                loaded.refused.append(f"{record.key}: version {record.version} is not known here")
                continue
            try:
                state = from_record(record, pipeline, controller.node)
            except (ValueError, StateError) as error:
                loaded.refused.append(f"{record.key}: {error}; deleted")
                loaded.to_write.add(name)
                continue
            if state.revision > controller.state.revision:
                controller.state = state
                if controller.adjust(controller.node, graph.downstream_of(name)):
                    loaded.to_write.add(name)
            elif state.revision < controller.state.revision:
                loaded.to_write.add(name)
        loaded.to_write.update(missing)
        return loaded

    def _decide(
        self, name: str, window: _Window, now_s: float, is_alive: Callable[[str], bool]
    ) -> Decision | None:
        controller = self.controllers[name]
        if not window.requests and controller.state.rate is None:
            return None
        changes, window.requests = list(window.requests.values()), {}
        holders = controller.state.holders
        decreases = [change for change in changes if change.request.direction is Direction.DECREASE]
        voices = {holder for holder in holders if is_alive(holder)}
        if decreases:
            chosen = max(decreases, key=lambda change: change.t_delay_ms)
        elif changes and voices.issubset(change.request.stage for change in changes):
            chosen = max(changes, key=lambda change: change.t_delay_ms)
        elif not voices and controller.state.rate is not None:
            chosen = controller.release(NOBODY_LEFT)
        else:
            return None
        asking = frozenset(change.request.stage for change in decreases)
        if not controller.apply(chosen, asking, now_s):
            return None
        return Decision(name, holders if controller.state.rate is None else ())
