"""Of several requests to one node in a period, apply the one that changes its rate most.

The largest delay wins, so a request to decrease beats any to increase. Whoever asked to decrease
holds the node, and the rate goes up only when every living stage that holds it asks for that, by
the smallest step asked for. A node that only stages hold that are gone or silent is released, one
step in a period. The period of a node is the longest one of the stages that consume from it.
"""

from collections.abc import Callable, Iterable

from proxy.state import Record
from proxy.state.journal import Journal

from .controller import FLOW_RECORDS, Controller, FlowRequest, from_record, to_record
from .graph import PipelineGraph
from .trigger import Direction

NOBODY_LEFT = "no stage that asked to hold it back is alive"


class Coordinator:
    """The controllers of a pipeline, and the requests of the present period."""

    def __init__(self, graph: PipelineGraph, now_ms: float) -> None:
        self.controllers: dict[str, Controller] = {}
        self.journal = Journal(self._record, self._key)
        self.update(graph, now_ms)

    def update(self, graph: PipelineGraph, now_ms: float) -> tuple[set[str], list[Controller]]:
        """Follow a reload; return the nodes whose state changed, and controllers that are gone."""
        self._graph = graph
        changed = set[str]()
        gone, self.controllers = self.controllers, {}
        for name, node in graph.nodes.items():
            controller = gone.get(name)
            consumers = graph.downstream_of(name)
            if controller is None or controller.node.is_source != node.is_source:
                controller = Controller(node)
            else:
                del gone[name]
                if controller.adjust(node, consumers):
                    changed.add(name)
                    self.journal.mark_changed(name)
            self.controllers[name] = controller
            # A stage that nobody consumes from any more may still have to be released.
            period_ms = max(graph.stages[stage].period_ms for stage in consumers or (name,))
            if controller.period_ms != period_ms:
                controller.period_ms, controller.due_ms = period_ms, now_ms + period_ms
            controller.requests.clear()
        for name in gone:
            self.journal.mark_removed(name)
        return changed, list(gone.values())

    def gather(self, request: FlowRequest) -> None:
        """Add a request; of two of a stage in one period the larger one counts."""
        controller = self.controllers[request.node]
        proposed = controller.weigh(request)
        earlier = controller.requests.get(request.stage)
        if earlier is None or earlier.t_delay_ms <= proposed.t_delay_ms:
            controller.requests[request.stage] = proposed

    def tick(self, now_ms: float, now_s: float, is_alive: Callable[[str], bool]) -> list[str]:
        """Apply at most one request to each node whose period is over; return what changed."""
        decided = []
        for name, controller in self.controllers.items():
            if now_ms < controller.due_ms:
                continue
            missed = (now_ms - controller.due_ms) // controller.period_ms
            controller.due_ms += controller.period_ms * (1 + missed)
            if _decide(controller, now_s, is_alive):
                decided.append(name)
                self.journal.mark_changed(name)
        return decided

    def load(self, records: Iterable[Record]) -> list[str]:
        """Load the states that are later than those here; return what was not, and why."""
        pipeline, refused = self._graph.settings.name, []
        names = {self._key(name): name for name in self.controllers}
        missing = {name for name, item in self.controllers.items() if item.state.rate is not None}
        for record in records:
            name = names.get(record.key)
            if name is None:
                refused.append(f"{record.key}: the pipeline has no such node; deleted")
                self.journal.mark_deleted(record.key)
                continue
            missing.discard(name)
            controller = self.controllers[name]
            if record.version != FLOW_RECORDS.version:
                refused.append(f"{record.key}: version {record.version} is not known here")
                continue
            try:
                state = from_record(record, pipeline, controller.node)
            except ValueError as error:
                refused.append(f"{record.key}: {error}; deleted")
                self.journal.mark_changed(name)
                continue
            if state.revision > controller.state.revision:
                controller.state = state
                if controller.adjust(controller.node, self._graph.downstream_of(name)):
                    self.journal.mark_changed(name)
            elif state.revision < controller.state.revision:
                self.journal.mark_changed(name)
        for name in missing:  # its record was lost
            self.journal.mark_changed(name)
        return refused

    def _key(self, node: str) -> str:
        return FLOW_RECORDS.key(self._graph.settings.name, node)

    def _record(self, node: str) -> Record | None:
        state = self.controllers[node].state
        return None if state.rate is None else to_record(self._graph.settings.name, node, state)


def _decide(controller: Controller, now_s: float, is_alive: Callable[[str], bool]) -> bool:
    """Apply one of the requests of a period; return whether the state is different now."""
    if not controller.requests and controller.state.rate is None:
        return False
    proposed, controller.requests = list(controller.requests.values()), {}
    decreases = [each for each in proposed if each.request.direction is Direction.DECREASE]
    voices = {holder for holder in controller.state.holders if is_alive(holder)}
    if decreases:
        chosen = max(decreases, key=lambda each: each.t_delay_ms)
    elif proposed and voices.issubset(each.request.stage for each in proposed):
        chosen = max(proposed, key=lambda each: each.t_delay_ms)
    elif not voices and controller.state.rate is not None:
        chosen = controller.release(NOBODY_LEFT)
    else:
        return False
    asking = frozenset(each.request.stage for each in decreases)
    return controller.apply(chosen, asking, now_s)
