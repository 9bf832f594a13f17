"""What rules there are, by the source that each comes from, and what all of them come to."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from .entities import QuotaKind
from .pauses import QuotaPause
from .rules import AdaptiveBound, QuotaSettings, Rule, RuleTable
from .selector import selector


class RuleOrigin(StrEnum):
    """Where a rule comes from. For the same keys OVERRIDE beats KAFKA, and KAFKA beats FILE."""

    OVERRIDE = "override"
    """An operator, at run time; kept in the state."""
    KAFKA = "kafka"
    """The cluster's own client quotas."""
    FILE = "file"
    """The configuration."""


@dataclass(frozen=True, slots=True)
class RuleEntry:
    """A rule, and how it got here."""

    rule: Rule
    source: RuleOrigin
    by: str | None = None
    """Who made the override; None when not known, and for other sources."""
    at_s: float | None = None
    """When, in seconds of the Unix epoch; None as for `by`."""
    in_force: bool = True
    """False when a rule of a stronger source has the same keys."""
    enforce: bool | None = None
    """What an override says of it; None: as the file's rule with the same keys."""
    until_s: float | None = None
    """When an override ends by itself, as `at_s`; None: not at all."""


@dataclass(frozen=True, slots=True)
class RuleSources:
    """All rules by source, as of one moment."""

    settings: QuotaSettings
    """The configuration's, with the rules of the file."""
    kafka: tuple[Rule, ...]
    overrides: Mapping[str, RuleEntry]
    """By the selectors of their rules."""
    pauses: Mapping[str, QuotaPause]
    """By their names."""

    def next_end_s(self) -> float:
        """Return when the first override or pause ends by itself."""
        ends = (entry.until_s for entry in self.overrides.values() if entry.until_s is not None)
        return min(chain(ends, (pause.until_s for pause in self.pauses.values())), default=math.inf)


@dataclass(frozen=True, slots=True)
class ComposedRules:
    """What the sources come to."""

    entries: tuple[RuleEntry, ...]
    """In order of precedence, those not in force too."""
    in_force: Mapping[str, RuleEntry]
    """By the selectors of their rules."""
    settings: QuotaSettings
    """With the rules in force."""
    table: RuleTable
    """Of the rules in force."""


def compose(sources: RuleSources) -> ComposedRules:
    """Return the rules in force, and those that they beat."""
    settings, overrides = sources.settings, sources.overrides
    strongest_first = chain(
        (overrides[name] for name in sorted(overrides)),
        (RuleEntry(rule, RuleOrigin.KAFKA) for rule in sources.kafka),
    )
    adaptive = {selector(rule.keys): rule.adaptive for rule in settings.rules if rule.adaptive}
    expected = {selector(rule.keys) for rule in settings.rules if rule.expected}
    observed = {selector(rule.keys) for rule in settings.rules if not rule.enforce}
    numbered = (
        replace(
            entry,
            rule=replace(
                _adapted(entry.rule, adaptive),
                number=number,
                expected=selector(entry.rule.keys) in expected,
                enforce=_is_enforced(entry, observed),
            ),
        )
        for number, entry in enumerate(strongest_first, len(settings.rules))
    )
    of_file = (RuleEntry(rule, RuleOrigin.FILE) for rule in settings.rules)
    by_name: dict[str, list[RuleEntry]] = {}
    for entry in chain(numbered, of_file):
        same = by_name.setdefault(selector(entry.rule.keys), [])
        same.append(replace(entry, in_force=not same))
    in_order = sorted(by_name.items(), key=lambda item: (item[1][0].rule.rank, item[0]))
    entries = tuple(entry for _, same in in_order for entry in same)
    in_force = {name: same[0] for name, same in in_order}
    rules = tuple(entry.rule for entry in in_force.values())
    table = RuleTable(rules, enforce=settings.enforce, pauses=sources.pauses.values())
    return ComposedRules(entries, in_force, replace(settings, rules=rules), table)


def _adapted(rule: Rule, adaptive: Mapping[str, AdaptiveBound]) -> Rule:
    """Return a rule with what the file's rule for the same keys says of an adaptive bound."""
    if rule.scope != "each" or QuotaKind.CONSUMER_BYTE_RATE not in rule.bounds:
        return rule
    return replace(rule, adaptive=adaptive.get(selector(rule.keys)))


def _is_enforced(entry: RuleEntry, observed: Set[str]) -> bool:
    """Return what an override says, or the file; `observed`: its rules that are not enforced."""
    if entry.enforce is not None:
        return entry.enforce
    return not observed or selector(entry.rule.keys) not in observed
