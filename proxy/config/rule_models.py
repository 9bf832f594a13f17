"""What the file says of one rule, and of one budget: keys, rates, and shares of a budget."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StrictBool, create_model

from proxy.config import fields
from proxy.config.fields import Conflict
from proxy.config.query_models import AdaptiveSection
from proxy.config.schedule_models import ScheduleSection
from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, QuotaKind
from proxy.quota.rules import Budget, Rule, Share
from proxy.quota.validation import RULE_KEYS, find_bound_problems, find_key_problems, is_open


class BudgetSection(fields.Section):
    """A rate for all clients of the rules, and budgets, that name it."""

    name: fields.Text = Field(examples=["name: analytics"])
    consumer_byte_rate: fields.Size | None = None
    producer_byte_rate: fields.Size | None = None
    budget: fields.Text | None = None
    weight: fields.Weight | None = None
    enforce: StrictBool = True
    when: ScheduleSection | None = None

    @property
    def bounds(self) -> dict[QuotaKind, float]:
        """Its own rates, in bytes per second."""
        rates = {
            CONSUMER_BYTE_RATE: self.consumer_byte_rate,
            PRODUCER_BYTE_RATE: self.producer_byte_rate,
        }
        return {kind: float(rate) for kind, rate in rates.items() if rate is not None}

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


class RuleKeys(fields.Section):
    """Whom a rule is for, whether they have one sensor each or one together, and are held."""

    user: fields.Text | None = None
    client_id: fields.Text | None = Field(default=None, alias="client-id")
    client_id_prefix: fields.Prefix | None = Field(default=None, alias="client-id-prefix")
    listener: fields.Text | None = None
    topic: fields.Topic | None = None
    topic_prefix: fields.TopicPrefix | None = Field(default=None, alias="topic-prefix")
    scope: Literal["each", "shared"] = "each"
    enforce: StrictBool = True


_BOUND_FIELDS: dict[str, Any] = {
    kind.value: (Annotated[float | None, BeforeValidator(kind.unit.parse)], None)
    for kind in QuotaKind
}
_RuleBounds: Any = create_model("_RuleBounds", __base__=RuleKeys, **_BOUND_FIELDS)


class RuleSection(_RuleBounds):  # type: ignore[misc]  # mypy knows no model that is made
    """The quotas of the clients that fit all of the rule's keys; a key for each `QuotaKind`.

    `user` and `client_id` may be `DEFAULT`. With `adaptive`, `consumer_byte_rate` is the most that
    a bound which moves can be.
    """

    adaptive: AdaptiveSection | None = None
    expected: StrictBool = False
    budget: fields.Text | None = None
    weight: fields.Weight | None = None
    guaranteed: fields.Size | None = None
    when: ScheduleSection | None = None

    @property
    def is_open(self) -> bool:
        """Whether clients decide how many shares of its budget it has."""
        return is_open(self.rule_keys, self.scope)

    @property
    def rule_keys(self) -> dict[str, str]:
        """The keys that the rule names, as they stand in the file."""
        keys = ((key, getattr(self, key.replace("-", "_"))) for key in RULE_KEYS)
        return {key: value for key, value in keys if value is not None}

    @property
    def bounds(self) -> dict[QuotaKind, float]:
        """What the rule bounds, in the unit of each kind."""
        bounds = {kind: getattr(self, kind.value) for kind in QuotaKind}
        return {kind: bound for kind, bound in bounds.items() if bound is not None}

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        keys, shared, adaptive = self.rule_keys, self.scope == "shared", self.adaptive is not None
        problems = find_bound_problems(
            *(keys, self.bounds), shared=shared, adaptive=adaptive, shares=self.budget is not None
        )
        for problem in (*find_key_problems(keys), *problems):
            path = (problem.key,) if problem.key else ()
            yield Conflict(path, problem.message, problem.fix)
        for key in ("guaranteed", "weight") if self.budget is None else ():
            if getattr(self, key) is not None:
                yield without_budget(key)

    def rule(self, place: str, number: int, budgets: Mapping[str, Budget]) -> Rule:
        """Return the rule, the `number`th of the file."""
        own = {*QuotaKind, "adaptive", "budget", "weight", "guaranteed", "when"}
        return Rule(
            **self.model_dump(exclude=own),
            bounds=self.bounds,
            share=share_of(budgets, self, self.guaranteed or 0.0),
            adaptive=self.adaptive.bound if self.adaptive else None,
            when=self.when.schedule if self.when else None,
            place=place,
            number=number,
        )
