"""What the file says of quotas: the rules, their backpressure, the budgets that they share."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, StrictBool

from proxy.quota import fields
from proxy.quota.entities import FORESEEN_KINDS, QuotaKind
from proxy.quota.fields import SectionProblem, required_with_example
from proxy.quota.rules import MOST_LEVELS, AdaptiveSettings, Budget, Rule, RuleKeys, Share
from proxy.quota.schedules import When, find_overlapping
from proxy.quota.validation import RULE_KEYS
from proxy.quota.values import format_ms, format_number, format_size, shown

DEFAULT_HOLD_MS: Final = 30_000.0

HOLD_INTERVALS: Final = 2
"""The default hold is at least so many batch intervals: a batch may take longer than one."""

GAINS: Final = ("proportional", "integral", "derivative")
"""Keys that only the estimator pid has."""


def _given_gains(data: dict[str, Any]) -> list[str]:
    return [name for name in GAINS if data[name] is not None]


def _default_hold_ms(data: dict[str, Any]) -> float:
    return max(DEFAULT_HOLD_MS, HOLD_INTERVALS * (data["batch_interval_ms"] or 0.0))


class AdaptiveSection(fields.ConfigSection):
    """How a rule's `consumer_byte_rate` follows the rate at which a query processes.

    None stands for no limit, or for the default of AdaptiveSettings.
    """

    min_rate: fields.RecordRate = 100.0
    max_rate: fields.RecordRate | None = None
    proportional: fields.Gain | None = None
    integral: fields.Gain | None = None
    derivative: fields.Gain | None = None
    estimator: Literal["cost", "pid"] = Field(
        default_factory=lambda data: "pid" if _given_gains(data) else "cost"
    )
    batch_interval_ms: fields.BatchInterval | None = None
    initial_rate: fields.RecordRate | None = None
    hold_ms: fields.Milliseconds = Field(default_factory=_default_hold_ms)

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        low, high = format_number(self.min_rate), format_number(self.max_rate or 0.0)
        for key, rate in (("max_rate", self.max_rate), ("initial_rate", self.initial_rate)):
            own = format_number(rate or 0.0)
            if rate is not None and rate < self.min_rate:
                fix = f"write at least {low}, or a min_rate of at most {own}"
                yield SectionProblem((key,), f"{own} is below min_rate, {low}", fix)
            elif rate is not None and self.min_rate <= (self.max_rate or 0.0) < rate:
                fix = f"write at most {high}, or a max_rate of at least {own}"
                yield SectionProblem((key,), f"{own} is above max_rate, {high}", fix)
        gains = _given_gains(vars(self))
        if self.estimator == "cost" and gains:
            fix = f"write pid, or leave {' and '.join(gains)} out"
            yield SectionProblem(("estimator",), f"cost has no {gains[0]}: that is of pid", fix)
        interval_ms = self.batch_interval_ms or 0.0
        if self.hold_ms <= interval_ms:
            own, interval, enough = map(
                format_ms, (self.hold_ms, interval_ms, HOLD_INTERVALS * interval_ms)
            )
            message = f"{own} is not longer than batch_interval, {interval}: each report would come"
            fix = f"write {enough} or more, or leave it out"
            yield SectionProblem(("hold",), f"{message} too late", fix)


class HasBounds(fields.SettingsBase):
    """A section that has a key for what it bounds, for each kind of quota that it can bound."""

    __slots__ = ()

    @property
    def bounds(self) -> dict[QuotaKind, float]:
        """Its own bounds, in the unit of each kind."""
        bounds = {kind: getattr(self, kind.value, None) for kind in QuotaKind}
        return {kind: float(bound) for kind, bound in bounds.items() if bound is not None}


class BudgetSection(HasBounds, fields.ConfigSection):
    """A rate for all clients of the rules, and budgets, that name it."""

    name: fields.Text = required_with_example("name: analytics")
    consumer_byte_rate: fields.Size | None = None
    producer_byte_rate: fields.Size | None = None
    budget: fields.Text | None = None
    weight: fields.Weight | None = None
    enforce: StrictBool = True
    when: When | None = None

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        if self.budget is None:
            if not self.bounds:
                fix = "add consumer_byte_rate or producer_byte_rate, or the budget that it is in"
                yield SectionProblem((), "sets no rate, and is in no budget that does", fix)
            if self.weight is not None:
                yield share_without_budget_problem("weight")


def budget_share_of(
    budgets: Mapping[str, Budget], of: "BudgetSection | RuleSection", guaranteed: float
) -> Share | None:
    """Return what a budget or the entities of a rule have of the budget that they name."""
    if of.budget is None:
        return None
    weight = 1.0 if of.weight is None else of.weight
    return Share(budgets[of.budget], weight, guaranteed)


def share_without_budget_problem(key: str) -> SectionProblem:
    """Return what is wrong with a share of nothing."""
    return SectionProblem(
        (key,), "is of no use without budget", "name the budget that it is a share of"
    )


_BOUND_FIELDS: list[Any] = [
    (kind.value, Annotated[float | None, BeforeValidator(kind.unit.parse)], None)
    for kind in QuotaKind
]
_RuleBounds: Any = make_dataclass(
    "_RuleBounds", _BOUND_FIELDS, bases=(HasBounds, RuleKeys), frozen=True, slots=True, kw_only=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSection(_RuleBounds):  # type: ignore[misc]  # mypy knows no class that is made
    """The quotas of the clients that fit all of the rule's keys; a key for each `QuotaKind`.

    `user` and `client_id` may be `DEFAULT`. With `adaptive`, `consumer_byte_rate` is the most that
    a bound which moves can be.
    """

    adaptive: AdaptiveSection | None = None
    expected: StrictBool = False
    budget: fields.Text | None = None
    weight: fields.Weight | None = None
    guaranteed: fields.Size | None = None
    when: When | None = None

    @property
    def rule_keys(self) -> dict[str, str]:
        """The keys that the rule names, as they stand in the file."""
        keys = self.keys
        return {key: keys[key] for key in RULE_KEYS if key in keys}

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        is_adaptive, shares = self.adaptive is not None, self.budget is not None
        for problem in self.find_problems(self.bounds, adaptive=is_adaptive, shares=shares):
            path = (problem.key,) if problem.key else ()
            yield SectionProblem(path, problem.message, problem.fix)
        for key in ("guaranteed", "weight") if self.budget is None else ():
            if getattr(self, key) is not None:
                yield share_without_budget_problem(key)


class QuotasSection(fields.ConfigSection):
    """How rates are measured, and the rules in the order of the file."""

    source: Literal["file", "kafka"] = "file"
    window_ms: fields.Window = 1000.0
    samples: fields.Samples = 11
    burst_ms: fields.MillisecondsOrZero | None = None
    budgets: tuple[BudgetSection, ...] = ()
    rules: tuple[RuleSection, ...] = ()

    def find_section_problems(self) -> Iterator[SectionProblem]:  # noqa: D102
        keyed = [(tuple(rule.rule_keys.items()), rule.when) for rule in self.rules]
        always = ((("rules", at), keys) for at, (keys, when) in enumerate(keyed) if not when)
        for loc, keys, earlier in fields.find_repeated(always):
            words = ", ".join(f"{key}: {value}" for key, value in keys)
            message = f"is for the same clients ({words}) as {fields.OTHER_PLACE}"
            yield SectionProblem(loc, message, "put the quotas of both into one rule", earlier)
        located = ((("rules", at), keys, when) for at, (keys, when) in enumerate(keyed) if when)
        for loc, earlier in find_overlapping(located):
            message = f"overlapping schedules: {fields.OTHER_PLACE} is for the same clients then"
            fix = "let one end where the other begins, or put the quotas of both into one rule"
            yield SectionProblem((*loc, "when"), message, fix, earlier)
        yield from self._budget_conflicts()

    def make_rules(self, place: Callable[[str], str]) -> Iterator[Rule]:
        """Yield the rules with their budgets; `place` tells where a key stands."""
        made: dict[str, Budget] = {}
        guaranteed = self._guaranteed()
        by_depth = sorted(enumerate(self.budgets), key=lambda item: len(self._around(item[1])))
        for at, each in by_depth:
            made[each.name] = Budget(
                name=each.name,
                bounds=each.bounds,
                enforce=each.enforce,
                share=budget_share_of(made, each, guaranteed[each.name]),
                when=each.when,
                place=place(f"quotas.budgets[{at}]"),
                number=at,
            )
        for number, rule in enumerate(self.rules):
            adaptive = rule.adaptive and rule.adaptive.model_dump(exclude_none=True)
            yield Rule(
                **rule.fields_of_keys(),
                expected=rule.expected,
                bounds=rule.bounds,
                share=budget_share_of(made, rule, rule.guaranteed or 0.0),
                adaptive=AdaptiveSettings(**adaptive) if adaptive else None,
                when=rule.when,
                place=place(f"quotas.rules[{number}]"),
                number=number,
            )

    def _budget_conflicts(self) -> Iterator[SectionProblem]:
        """Yield what is wrong with budgets; of guarantees only where they lie in budgets."""
        placed = [(("budgets", at, "budget"), each.budget) for at, each in enumerate(self.budgets)]
        placed += [(("rules", at, "budget"), each.budget) for at, each in enumerate(self.rules)]
        structural = [
            *fields.find_used_twice(("budgets",), self.budgets, "name", "budget"),
            *fields.find_unknown_names(
                placed, list(self._named), "budget", "add it to quotas.budgets"
            ),
        ]
        yield from structural
        if not structural:
            too_deep = list(self._deep())
            yield from too_deep
            if not too_deep:
                yield from self._guarantees()

    @property
    def _named(self) -> dict[str, BudgetSection]:
        return {each.name: each for each in self.budgets}

    def _around(self, of: BudgetSection | RuleSection) -> list[BudgetSection]:
        """Return the budgets that one is in, the innermost first; of a circle each once."""
        named, found = self._named, list[BudgetSection]()
        while of.budget is not None and (outer := named[of.budget]) not in found:
            found.append(outer)
            of = outer
        return found

    def _deep(self) -> Iterator[SectionProblem]:
        for at, each in enumerate(self.budgets):
            around = self._around(each)
            words = ", in ".join(shown(one.name) for one in (each, *around))
            loc = ("budgets", at, "budget")
            if each in around:
                yield SectionProblem(loc, f"is a circle: {words}", "remove budget from one of them")
            elif len(around) == MOST_LEVELS:
                message = f"is level {MOST_LEVELS + 1}: {words}"
                fix = f"put it into {shown(around[-2].name)}: there are {MOST_LEVELS} levels"
                yield SectionProblem(loc, message, fix)

    def _guarantees(self) -> Iterator[SectionProblem]:
        for at, rule in enumerate(self.rules):
            loc, bounds = ("rules", at, "guaranteed"), rule.bounds
            kind = min(FORESEEN_KINDS & bounds.keys(), key=bounds.__getitem__, default=None)
            if rule.guaranteed is not None and rule.is_open:
                message = "is for each of many clients, and adds up without end"
                yield SectionProblem(
                    loc, message, "name one client or user, or write scope: shared"
                )
            if rule.guaranteed is not None and kind and rule.guaranteed > bounds[kind]:
                own, most = format_size(rule.guaranteed), format_size(round(bounds[kind]))
                message = f"{own} is above the rule's {kind}, {most}"
                yield SectionProblem(loc, message, f"write at most {most}, or raise {kind}")
        guaranteed = self._guaranteed()
        for at, each in enumerate(self.budgets):
            for kind, rate in each.bounds.items():
                if guaranteed[each.name] > rate:
                    own, most = format_size(round(guaranteed[each.name])), format_size(round(rate))
                    message = f"{most} is less than its clients are guaranteed, {own} in all"
                    fix = f"write {own} or more, or guarantee less"
                    yield SectionProblem(("budgets", at, kind.value), message, fix)

    def _guaranteed(self) -> Mapping[str, float]:
        """Return what the clients of each budget are guaranteed in all at most, by its name."""
        found: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for rule in self.rules:
            keys, own = (*rule.rule_keys, *rule.rule_keys.values()), float(rule.guaranteed or 0)
            for each in self._around(rule) if own else ():
                found[each.name][keys] = max(own, found[each.name].get(keys, 0.0))
        return defaultdict(float, {name: sum(each.values()) for name, each in found.items()})
