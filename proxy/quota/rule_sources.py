"""What rules there are, by the source that each comes from, and what all of them come to."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TypeAlias

from .entities import QuotaKind
from .rules import QuotaPause, QuotaSettings, Rule, RuleTable
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


KeptChange: TypeAlias = RuleEntry | QuotaPause
"""What an operator changes at run time: an override, or a pause."""


@dataclass(frozen=True, slots=True)
class RuleSources:
    """All rules by source, as of one moment."""

    settings: QuotaSettings
    """The configuration's, with the rules of the file."""
    kafka: tuple[Rule, ...]
    kept: Mapping[str, KeptChange]
    """Overrides and pauses by the keys of their records."""

    @property
    def overrides(self) -> list[RuleEntry]:
        """The overrides in the order of their selectors."""
        return [each for _, each in sorted(self.kept.items()) if isinstance(each, RuleEntry)]

    @property
    def pauses(self) -> list[QuotaPause]:
        """The pauses in the order of their making."""
        return [each for each in self.kept.values() if isinstance(each, QuotaPause)]


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
    settings = sources.settings
    of_file = {selector(rule.keys): RuleEntry(rule, RuleOrigin.FILE) for rule in settings.rules}
    of_kafka = (RuleEntry(rule, RuleOrigin.KAFKA) for rule in sources.kafka)
    by_name: dict[str, list[RuleEntry]] = {}
    for number, entry in enumerate(chain(sources.overrides, of_kafka), len(settings.rules)):
        name = selector(entry.rule.keys)
        replaced = _in_place_of(of_file.get(name), entry, number)
        by_name.setdefault(name, []).append(replaced)
    for name, entry in of_file.items():
        by_name.setdefault(name, []).append(entry)
    in_order = sorted(by_name.items(), key=lambda item: (item[1][0].rule.rank, item[0]))
    in_force = {name: same[0] for name, same in in_order}
    entries = tuple(
        entry if entry is same[0] else replace(entry, in_force=False)
        for _, same in in_order
        for entry in same
    )
    rules = tuple(entry.rule for entry in in_force.values())
    table = RuleTable(rules, enforce=settings.enforce, pauses=sources.pauses)
    return ComposedRules(entries, in_force, replace(settings, rules=rules), table)


def _in_place_of(of_file: RuleEntry | None, entry: RuleEntry, number: int) -> RuleEntry:
    """Return an entry with a number, and with what the file's rule for its keys leaves open."""
    rule, enforce = entry.rule, entry.enforce is not False
    if of_file is None:
        return replace(entry, rule=replace(rule, number=number, enforce=enforce))
    beaten = of_file.rule
    can_adapt = rule.scope == "each" and QuotaKind.CONSUMER_BYTE_RATE in rule.bounds
    rule = replace(
        rule,
        number=number,
        adaptive=beaten.adaptive if can_adapt else None,
        expected=beaten.expected,
        enforce=beaten.enforce if entry.enforce is None else enforce,
    )
    return replace(entry, rule=rule)
