"""Describes rules and pauses: where each comes from, and when it ends."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from proxy.admin.document_models import Model, Moment
from proxy.admin.written_values import iso, left_s, picked
from proxy.quota.entities import QuotaKind
from proxy.quota.rule_registry import RuleEntry, RuleRegistry
from proxy.quota.rules import QuotaPause, Rule, Share
from proxy.quota.validation import BUDGET_KEY, selector
from proxy.state import Document

MOST_SCHEDULED = 20
"""So many rules and budgets with a schedule are in each answer; `/v1/quotas` has all."""


def _by_kind(figures: Mapping[QuotaKind, float]) -> Document:
    return {str(kind): figure for kind, figure in figures.items()}


def _of_rule(name: str) -> Callable[[RuleEntry, Moment], Any]:
    return lambda entry, _: getattr(entry.rule, name)


RULE = Model[RuleEntry](
    """
    selector, keys: what a path names it by, and the same by keys
    scope: `each` or `shared`
    enforce: `false`: [only observed](quotas.md#observe-before-you-enforce)
    expected: what it says of an [alert](operations.md)
    adaptive: `null`, or its settings: records per second, milliseconds
    bounds: all its quotas
    share: `null`, or what it has of a budget: `budget`, `weight`, `guaranteed`
    ceilings: what a client of it can have at most
    title, place: what the log calls it, and where it is in the file
    source, by, at: `file`, `override` or `kafka`; who set an override, and when
    until, left_s: when it ends by itself, and in how many seconds; both `null`: not at all
    when: `null`, or its [schedule](quotas.md#schedules): `days`, `from`, `to`, `timezone`
    schedule: `null` without `when`, or in words: `in force until 2026-11-27 18:00+01:00`, or when
        it `begins`
    in_force: `false` where a rule of a stronger source has the same keys, and outside of its
        schedule
    """,
    {
        "selector": lambda entry, _: selector(entry.rule.keys),
        "adaptive": lambda entry, _: entry.rule.adaptive and asdict(entry.rule.adaptive),
        "bounds": lambda entry, _: _by_kind(entry.rule.bounds),
        "share": lambda entry, _: entry.rule.share and _share(entry.rule.share),
        "ceilings": lambda entry, _: _by_kind(entry.rule.ceilings),
        "source": lambda entry, _: str(entry.source),
        "at": lambda entry, _: iso(entry.at_s),
        "until": lambda entry, _: iso(entry.until_s),
        "schedule": lambda entry, now: now.schedules.get(entry.rule.title),
        "left_s": lambda entry, now: left_s(entry.until_s, now.now_s),
        "when": lambda entry, _: entry.rule.when and entry.rule.when.document(),
        **{
            name: _of_rule(name)
            for name in ("keys", "scope", "enforce", "expected", "title", "place")
        },
    },
)

BUDGET_RULE = Model[RuleEntry](
    """
    name, budget: of the budget, and of the one that it is in
    selector, enforce, title, place, bounds, source, by, at, until, left_s: as of a rule; with the
        rates of an override if there is one
    when, schedule, in_force: as of a rule
    """,
    {
        "name": lambda entry, _: entry.rule.keys[BUDGET_KEY],
        "budget": lambda entry, _: entry.rule.share and entry.rule.share.budget.name,
    },
    like=RULE,
)

PAUSE = Model[QuotaPause](
    """
    selector, keys: whose quotas are paused
    until, left_s: when it ends by itself, and in how many seconds
    by, at: who paused them, and when
    """,
    {
        "selector": lambda pause, _: pause.name,
        "keys": lambda pause, _: dict(pause.keys),
        "until": lambda pause, _: iso(pause.until_s),
        "left_s": lambda pause, now: left_s(pause.until_s, now.now_s),
        "at": lambda pause, _: iso(pause.at_s),
    },
)


def _share(share: Share) -> Document:
    return {"budget": share.budget.name, **picked(share, "weight", "guaranteed")}


def rule_name(rule: Rule, now: Moment) -> Document:
    """Return what names a rule; a sensor may be under one that has gone, which has no source."""
    name = selector(rule.keys)
    entry = now.in_force.get(name)
    origin: Document = dict.fromkeys(("source", "by", "at", "until", "schedule"))
    if entry is not None:
        about = {"schedule": now.schedules.get(entry.rule.title), "at": iso(entry.at_s)}
        origin = {"source": str(entry.source), "by": entry.by, **about, "until": iso(entry.until_s)}
    return {"selector": name, **picked(rule, "title", "place"), **origin}


def rule_change(entry: RuleEntry) -> Document:
    """Return what a rule sets, in the words of the configuration, as the audit shows it.

    `enforce` and `until` are there where they are not what most rules have.
    """
    rule = entry.rule
    return {
        **{str(kind): kind.unit.format(bound) for kind, bound in rule.bounds.items()},
        "scope": rule.scope,
        "source": str(entry.source),
        "by": entry.by,
        **({} if rule.enforce else {"enforce": False}),
        **({} if entry.until_s is None else {"until": iso(entry.until_s)}),
    }


def throttling_document(rules: RuleRegistry, now_s: float) -> Document:
    """Return whether quotas are enforced, for whom they are paused, and schedules, for JSON."""
    paused = [PAUSE.document(pause, Moment(now_s)) for pause in rules.pauses()]
    told = rules.composed.of_file.told
    scheduled = [
        {"selector": selector(each.rule.keys), "schedule": told[each.rule.title]}
        for each in ((*rules.composed.budgets, *rules.composed.entries) if told else ())
        if each.rule.title in told
    ]
    shown = scheduled[:MOST_SCHEDULED]
    return {"enforced": rules.is_enforced, "paused": paused, "scheduled": shown}
