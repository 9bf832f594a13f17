"""What the file says of one rule, and of one budget: keys, rates, and shares of a budget."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, StrictBool

from proxy.config.query_models import AdaptiveSection
from proxy.quota import fields
from proxy.quota.entities import QuotaKind
from proxy.quota.fields import Conflict, example
from proxy.quota.rules import Budget, Rule, RuleKeys, Share
from proxy.quota.schedules import When
from proxy.quota.validation import RULE_KEYS


class Bounded(fields.Settings):
    """A section that has a key for what it bounds, for each kind of quota that it can bound."""

    __slots__ = ()

    @property
    def bounds(self) -> dict[QuotaKind, float]:
        """Its own bounds, in the unit of each kind."""
        bounds = {kind: getattr(self, kind.value, None) for kind in QuotaKind}
        return {kind: float(bound) for kind, bound in bounds.items() if bound is not None}


class BudgetSection(Bounded, fields.Section):
    """A rate for all clients of the rules, and budgets, that name it."""

    name: fields.Text = example("name: analytics")
    consumer_byte_rate: fields.Size | None = None
    producer_byte_rate: fields.Size | None = None
    budget: fields.Text | None = None
    weight: fields.Weight | None = None
    enforce: StrictBool = True
    when: When | None = None

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        if self.budget is None:
            if not self.bounds:
                fix = "add consumer_byte_rate or producer_byte_rate, or the budget that it is in"
                yield Conflict((), "sets no rate, and is in no budget that does", fix)
            if self.weight is not None:
                yield without_budget("weight")


def share_of(
    budgets: Mapping[str, Budget], of: "BudgetSection | RuleSection", guaranteed: float
) -> Share | None:
    """Return what a budget or the entities of a rule have of the budget that they name."""
    if of.budget is None:
        return None
    weight = 1.0 if of.weight is None else of.weight
    return Share(budgets[of.budget], weight, guaranteed)


def without_budget(key: str) -> Conflict:
    """Return what is wrong with a share of nothing."""
    return Conflict((key,), "is of no use without budget", "name the budget that it is a share of")


_BOUND_FIELDS: list[Any] = [
    (kind.value, Annotated[float | None, BeforeValidator(kind.unit.parse)], None)
    for kind in QuotaKind
]
_RuleBounds: Any = make_dataclass(
    "_RuleBounds", _BOUND_FIELDS, bases=(Bounded, RuleKeys), frozen=True, slots=True, kw_only=True
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

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        is_adaptive, shares = self.adaptive is not None, self.budget is not None
        for problem in self.find_problems(self.bounds, adaptive=is_adaptive, shares=shares):
            path = (problem.key,) if problem.key else ()
            yield Conflict(path, problem.message, problem.fix)
        for key in ("guaranteed", "weight") if self.budget is None else ():
            if getattr(self, key) is not None:
                yield without_budget(key)

    def rule(self, place: str, number: int, budgets: Mapping[str, Budget]) -> Rule:
        """Return the rule, the `number`th of the file."""
        return Rule(
            **self.fields_of_keys(),
            expected=self.expected,
            bounds=self.bounds,
            share=share_of(budgets, self, self.guaranteed or 0.0),
            adaptive=self.adaptive.bound if self.adaptive else None,
            when=self.when,
            place=place,
            number=number,
        )
