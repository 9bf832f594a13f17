"""What the file says of budgets: rates that the clients of several rules share."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from proxy.config.rule_models import BudgetSection, RuleSection, share_of
from proxy.quota import fields
from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from proxy.quota.fields import Conflict
from proxy.quota.rules import MOST_LEVELS, Budget
from proxy.quota.values import format_size, shown

BYTE_KINDS = {CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE}
"""What budgets bound."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """The budgets of a file with the rules that share them."""

    sections: Sequence[BudgetSection]
    rules: Sequence[RuleSection]

    def find_conflicts(self) -> Iterator[Conflict]:
        """Yield what is wrong between them; of guarantees only where they lie in budgets."""
        placed = [(("budgets", at, "budget"), each.budget) for at, each in enumerate(self.sections)]
        placed += [(("rules", at, "budget"), each.budget) for at, each in enumerate(self.rules)]
        structural = [
            *fields.find_used_twice(("budgets",), self.sections, "name", "budget"),
            *fields.find_unknown(placed, list(self._named), "budget", "add it to quotas.budgets"),
        ]
        yield from structural
        if not structural:
            too_deep = list(self._deep())
            yield from too_deep
            if not too_deep:
                yield from self._guarantees()

    def make(self, place: Callable[[str], str]) -> dict[str, Budget]:
        """Return the budgets by their names; `place` tells where a key stands."""
        made: dict[str, Budget] = {}
        guaranteed = self._guaranteed()
        by_depth = sorted(enumerate(self.sections), key=lambda item: len(self._around(item[1])))
        for at, each in by_depth:
            made[each.name] = Budget(
                name=each.name,
                bounds=each.bounds,
                enforce=each.enforce,
                share=share_of(made, each, guaranteed[each.name]),
                when=each.when,
                place=place(f"quotas.budgets[{at}]"),
                number=at,
            )
        return made

    @property
    def _named(self) -> dict[str, BudgetSection]:
        return {each.name: each for each in self.sections}

    def _around(self, of: BudgetSection | RuleSection) -> list[BudgetSection]:
        """Return the budgets that one is in, the innermost first; of a circle each once."""
        named, found = self._named, list[BudgetSection]()
        while of.budget is not None and (outer := named[of.budget]) not in found:
            found.append(outer)
            of = outer
        return found

    def _deep(self) -> Iterator[Conflict]:
        for at, each in enumerate(self.sections):
            around = self._around(each)
            words = ", in ".join(shown(one.name) for one in (each, *around))
            loc = ("budgets", at, "budget")
            if each in around:
                yield Conflict(loc, f"is a circle: {words}", "remove budget from one of them")
            elif len(around) == MOST_LEVELS:
                message = f"is level {MOST_LEVELS + 1}: {words}"
                fix = f"put it into {shown(around[-2].name)}: there are {MOST_LEVELS} levels"
                yield Conflict(loc, message, fix)

    def _guarantees(self) -> Iterator[Conflict]:
        for at, rule in enumerate(self.rules):
            loc, bounds = ("rules", at, "guaranteed"), rule.bounds
            kind = min(BYTE_KINDS & bounds.keys(), key=bounds.__getitem__, default=None)
            if rule.guaranteed is not None and rule.is_open:
                message = "is for each of many clients, and adds up without end"
                yield Conflict(loc, message, "name one client or user, or write scope: shared")
            if rule.guaranteed is not None and kind and rule.guaranteed > bounds[kind]:
                own, most = format_size(rule.guaranteed), format_size(round(bounds[kind]))
                message = f"{own} is above the rule's {kind}, {most}"
                yield Conflict(loc, message, f"write at most {most}, or raise {kind}")
        guaranteed = self._guaranteed()
        for at, each in enumerate(self.sections):
            for kind, rate in each.bounds.items():
                if guaranteed[each.name] > rate:
                    own, most = format_size(round(guaranteed[each.name])), format_size(round(rate))
                    message = f"{most} is less than its clients are guaranteed, {own} in all"
                    fix = f"write {own} or more, or guarantee less"
                    yield Conflict(("budgets", at, kind.value), message, fix)

    def _guaranteed(self) -> Mapping[str, float]:
        """Return what the clients of each budget are guaranteed in all at most, by its name."""
        found: defaultdict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for rule in self.rules:
            keys, own = (*rule.rule_keys, *rule.rule_keys.values()), float(rule.guaranteed or 0)
            for each in self._around(rule) if own else ():
                found[each.name][keys] = max(own, found[each.name].get(keys, 0.0))
        return defaultdict(float, {name: sum(each.values()) for name, each in found.items()})
