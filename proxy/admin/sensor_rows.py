"""Lists the sensors in use as operators see them, with what clients have of budgets.

What is one client's to operators is together. A share is what a client would get if all that are
active wanted more than there is.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest

from proxy.admin.document_models import rate_text
from proxy.quota.entities import TRAFFIC_KINDS, ClientIdentity
from proxy.quota.manager import QuotaManager
from proxy.quota.meter import Meter, sensor_name
from proxy.quota.meters import Clock
from proxy.quota.rules import Budget, Rule
from proxy.quota.shares import Claim, shares_by_claim

SLIGHTLY = 1e-6
"""Figures that differ by less of themselves are the same."""

MOST_BINDING = 2
"""Of the guarantees that others wait for so many are kept: one, and one that is not its own."""


@dataclass(frozen=True, slots=True)
class BudgetPart:
    """What a sensor has of a budget, as the document of a client says; in bytes per second."""

    budget: str
    weight: float
    guaranteed: float
    ceiling: float
    fair_share: float | None = None
    borrowed: float = 0.0
    lent: float = 0.0
    waits_for: str | None = None


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One rate of a budget."""

    budget: Budget
    meter: Meter
    """Of all its clients together; one that nothing was charged to where it has had none."""
    guaranteed: float
    """To all its clients together, active or not."""
    active_clients: int


@dataclass(slots=True, eq=False)
class _SharedBudget:
    """A budget with its sharers: active clients, and budgets that have some."""

    meter: Meter
    rate: float
    waiting: int
    """How many connections wait at the gates of budgets that it is in."""
    numbers: Counter[Claim] = field(default_factory=Counter)
    """How many sharers have each claim: 10,000 with the same one cost as much as ten."""
    highest: dict[Claim, float] = field(default_factory=dict)
    """Of the rates of those with a claim."""
    shares: dict[Claim, float] = field(default_factory=dict)
    """Of each of them, after `divide`."""
    guarantees: list[tuple[Claim, Meter, float]] = field(default_factory=list)
    """Of its sharers that have any, with their rates; after `divide` the largest of those that
    others wait for."""
    active_clients: int = 0
    """At all depths."""
    wanting: int = 0
    """How many of its sharers wait."""
    in_line: int = 0
    """How many clients wait at its own gate."""
    is_borrowed: bool = False
    """Whether a sharer gets more than its share."""
    most: float = math.inf
    """Its share of the budget around it, if there is one that is enforced."""

    def add(self, meter: Meter, claim: Claim, rate: float, *, waits: bool) -> None:
        """Add a sharer."""
        self.numbers[claim] += 1
        self.highest[claim] = max(self.highest.get(claim, 0.0), rate)
        self.wanting += waits
        if claim.guaranteed:
            self.guarantees.append((claim, meter, rate))

    @property
    def demand(self) -> float:
        """What all its sharers can have."""
        return math.fsum(number * claim.most for claim, number in self.numbers.items())

    def divide(self) -> None:
        """Give each sharer its share."""
        self.shares = shares_by_claim(min(self.meter.bound, self.most), self.numbers)
        shares = self.shares.items()
        self.is_borrowed = any(self.highest[of] > share * (1 + SLIGHTLY) for of, share in shares)
        hungry = (share / of.weight for of, share in shares if share < of.most * (1 - SLIGHTLY))
        level = min(hungry, default=math.inf)
        waited_for = (
            (claim, meter, rate)
            for claim, meter, rate in self.guarantees
            if min(claim.guaranteed, rate) > level * claim.weight * (1 + SLIGHTLY)
        )
        self.guarantees = nlargest(MOST_BINDING, waited_for, key=lambda each: each[0].guaranteed)


class BudgetShareCalculator:
    """The shares of all clients of budgets that are active at a time: `add` them, then `settle`.

    Nothing is kept of each client: that many objects would bring on Python's full collections.
    """

    def __init__(self) -> None:
        self._budgets: dict[Meter, _SharedBudget] = {}

    def add(self, meter: Meter, now_ms: float) -> None:
        """Count a sensor if it is that of an active client, and charged to a budget."""
        if not _is_sharing(meter, now_ms):
            return
        waits = meter.budget_waits()
        for budget in meter.charged[1:]:
            shared = self._budgets.get(budget)
            if shared is None:
                waiting = sum(budget.budget_waits().values())
                shared = _SharedBudget(budget, budget.rate.measure(now_ms), waiting)
                self._budgets[budget] = shared
            shared.active_clients += 1
            shared.in_line += budget is next(iter(waits), None)
        around, rate = self._budgets[meter.charged[1]], meter.rate.measure(now_ms)
        around.add(meter, _claim(meter), rate, waits=bool(waits))

    def settle(self) -> None:
        """Divide all budgets among those that were added."""
        inner_first = sorted(self._budgets.values(), key=lambda each: -len(each.meter.charged))
        claims: dict[_SharedBudget, Claim] = {}
        for shared in inner_first:
            around = self._around(shared.meter)
            if around is not None:
                claim = claims[shared] = _claim(shared.meter, shared.demand)
                around.add(shared.meter, claim, shared.rate, waits=shared.waiting > 0)
        for shared in reversed(inner_first):
            around = self._around(shared.meter)
            if around is not None and around.meter.is_enforced:
                shared.most = around.shares[claims[shared]]
            shared.divide()

    def part(self, meter: Meter, now_ms: float) -> BudgetPart | None:
        """Return what a sensor has of a budget; None if none bounds it."""
        share, kind = meter.rule.share, meter.kind
        if share is None or kind not in share.budget.ceilings:
            return None
        ceiling = meter.rule.ceilings[kind]
        part = BudgetPart(share.budget.name, share.weight, share.guaranteed, ceiling)
        if not _is_sharing(meter, now_ms):
            return replace(part, lent=self._used_of(share.guaranteed, meter))
        around = self._around(meter)
        if around is None or (fair := around.shares.get(_claim(meter))) is None:
            return part
        rate, waits = meter.rate.measure(now_ms), meter.budget_waits()
        lends = not waits and self._is_wanted(around)  # who waits itself leaves nothing
        return replace(
            part,
            fair_share=fair,
            borrowed=max(rate - fair, 0.0),
            lent=max(fair - rate, 0.0) if lends else 0.0,
            waits_for=self._waits_for(meter, next(iter(waits))) if waits else None,
        )

    def rows(
        self, budgets: Iterable[tuple[Budget, float]], sensors: Mapping[str, Meter]
    ) -> Iterator[BudgetRow]:
        """Yield the rates of budgets, given with what each guarantees in all."""
        for budget, guaranteed in budgets:
            for kind in budget.ceilings:
                name = sensor_name(kind, budget.shared_entity)
                meter = sensors.get(name) or Meter(
                    kind, budget.shared_entity, budget, is_enforced=budget.enforce
                )
                shared = self._budgets.get(meter)
                active = shared.active_clients if shared else 0
                yield BudgetRow(budget, meter, guaranteed, active)

    def _around(self, meter: Meter) -> _SharedBudget | None:
        """Return the budget that the clients of a sensor, or another budget, have a share of."""
        return None if meter.budget is None else self._budgets.get(meter.budget)

    def _is_wanted(self, around: _SharedBudget | None) -> bool:
        """Return whether others of its budgets want what a client leaves: wait, or borrow."""
        waits = False
        while around is not None:
            if around.is_borrowed or around.wanting > waits:
                return True
            waits, around = around.waiting > 0, self._around(around.meter)
        return False

    def _used_of(self, guaranteed: float, idle: Meter) -> float:
        """Return what of an idle client's guarantee the others of its budget have."""
        around = self._around(idle)
        if around is None:
            return 0.0
        return min(max(around.rate - (around.meter.bound - guaranteed), 0.0), guaranteed)

    def _waits_for(self, within: Meter, gate_of: Meter) -> str:
        """Return what connections of a client wait for at the gate of a budget that it is in."""
        while (around := self._around(within)) is not None:
            binding = around.guarantees
            if binding and all(within is not meter for _, meter, _ in binding):
                claim, first, _ = binding[0]
                who, rate = _in_words(first.rule), rate_text(claim.guaranteed)
                return f"waits for {who}, which has {rate} guaranteed"
            if around.meter is gate_of:
                break
            within = around.meter
        line = self._budgets.get(gate_of)
        others = 0 if line is None else line.in_line - 1
        beside = f", with {others:,} other{'s' * (others > 1)}" if others > 0 else ""
        return f"waits for its turn in {_in_words(gate_of.rule)}{beside}"


def _is_sharing(meter: Meter, now_ms: float) -> bool:
    """Return whether a sensor's client is active, and charged to a budget that holds it."""
    is_charged = len(meter.charged) > 1 and not isinstance(meter.rule, Budget)
    return meter.is_enforced and is_charged and meter.is_active(now_ms)


def _claim(meter: Meter, demand: float = math.inf) -> Claim:
    """Return what a client, or a budget, may have of its budget if it wants so much."""
    share = meter.rule.share
    assert share is not None
    return Claim(share.weight, share.guaranteed, min(demand, meter.bound))


def _in_words(rule: Rule) -> str:
    """Return what people call the clients of a rule, or a budget."""
    if isinstance(rule, Budget):
        return f"budget {rule.name}"
    values = list(rule.keys.values())
    return values[0] if len(values) == 1 else rule.shared_entity


SHOWN_CLIENTS = 20
"""How many clients a row names; it counts them all."""


@dataclass(frozen=True, slots=True)
class SensorRow:
    """A sensor with the connected clients whose latest traffic was charged to it."""

    meter: Meter
    clients: tuple[ClientIdentity, ...]
    """At most SHOWN_CLIENTS."""
    client_count: int
    part: BudgetPart | None
    """Of a budget; None where it shares none."""

    def share(self, now_ms: float) -> float:
        """Return the part of its bound that is used."""
        return self.meter.rate.measure(now_ms) / self.meter.shown_bound


def rows_by_client(
    quotas: QuotaManager, clock_ms: Clock, shares: BudgetShareCalculator | None = None
) -> Iterator[list[SensorRow]]:
    """Yield the rows of what is one client to operators together; [] for a step without.

    What only one connected client is charged to is that client's. An entity's other sensors, shared
    by several clients or left by all, are together; but those left by all go to a client that is
    charged to another sensor of the entity: it has most likely come back. `shares` is filled with
    what clients have of budgets.
    """
    quotas.take_back(clock_ms(), are_all=True)
    shares = BudgetShareCalculator() if shares is None else shares
    for meter in quotas.iter_meters() if quotas.table.budgets else ():
        shares.add(meter, clock_ms())
        yield []
    shares.settle()
    charged: dict[str, list[ClientIdentity]] = {}
    for client in quotas.clients():
        for meter in quotas.sensors_of(client):
            charged.setdefault(meter.name, []).append(client)
        yield []
    groups: dict[ClientIdentity | str, list[Meter]] = {}
    for meter in quotas.iter_meters():
        if not isinstance(meter.rule, Budget):
            groups.setdefault(_shown_with(meter, charged), []).append(meter)
        yield []
    for meters in groups.values():
        rows: list[SensorRow] = []
        for meter in meters:
            if meter.retired:  # by now
                continue
            clients, part = charged.get(meter.name, ()), shares.part(meter, clock_ms())
            rows.append(SensorRow(meter, tuple(clients[:SHOWN_CLIENTS]), len(clients), part))
        yield rows


def _shown_with(
    meter: Meter, charged: Mapping[str, Sequence[ClientIdentity]]
) -> ClientIdentity | str:
    """Return the client or the entity whose rows a sensor is with; see `rows_by_client`."""
    names = [meter.name]
    if meter.name not in charged:
        names = [sensor_name(kind, meter.entity) for kind in TRAFFIC_KINDS]
    own = (charged[name][0] for name in names if len(charged.get(name, ())) == 1)
    return next(own, meter.entity)
