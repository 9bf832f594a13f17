"""Describes rules and pauses: where each comes from, and when it ends."""

from collections.abc import Mapping
from dataclasses import asdict

from proxy.admin.written_values import iso, left_s, picked
from proxy.quota.rule_registry import RuleEntry, RuleRegistry
from proxy.quota.rules import Rule, Share
from proxy.quota.validation import selector
from proxy.state import Document


def rule_entry(entry: RuleEntry, now_s: float) -> Document:
    """Return a rule with where it comes from, as `GET /v1/quotas` shows it."""
    rule = entry.rule
    return {
        "selector": selector(rule.keys),
        **picked(rule, "keys", "scope", "enforce", "expected", "title", "place"),
        "adaptive": asdict(rule.adaptive) if rule.adaptive is not None else None,
        "bounds": {str(kind): bound for kind, bound in rule.bounds.items()},
        "share": None if rule.share is None else _share(rule.share),
        "ceilings": {str(kind): most for kind, most in rule.ceilings.items()},
        **_origin(entry),
        "left_s": left_s(entry.until_s, now_s),
        "when": _when(rule),
        "in_force": entry.in_force,
    }


def _share(share: Share) -> Document:
    """Return what each client of a rule has of a budget."""
    return {"budget": share.budget.name, **picked(share, "weight", "guaranteed")}


def rule_name(rule: Rule, in_force: Mapping[str, RuleEntry]) -> Document:
    """Return what names a rule; a sensor may be under one that has gone, which has no source."""
    name = selector(rule.keys)
    entry = in_force.get(name)
    origin = dict.fromkeys(("source", "by", "at", "until")) if entry is None else _origin(entry)
    return {"selector": name, **picked(rule, "title", "place"), **origin}


def budget_entry(entry: RuleEntry, now_s: float) -> Document:
    """Return a budget, as `GET /v1/quotas` shows it."""
    budget = entry.rule
    return {
        "name": budget.keys["budget"],
        "selector": selector(budget.keys),
        **picked(budget, "enforce", "title", "place"),
        "budget": budget.share.budget.name if budget.share is not None else None,
        "bounds": {str(kind): bound for kind, bound in budget.bounds.items()},
        **_origin(entry),
        "left_s": left_s(entry.until_s, now_s),
        "when": _when(budget),
        "in_force": entry.in_force,
    }


def _when(rule: Rule) -> Document | None:
    return rule.when.document() if rule.when is not None else None


def _origin(entry: RuleEntry) -> Document:
    """Return where a rule comes from."""
    return {
        "source": str(entry.source),
        "by": entry.by,
        "at": iso(entry.at_s),
        "until": iso(entry.until_s),
    }


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
    """Return whether quotas are enforced, and for whom they are paused, for JSON."""
    paused = [
        {
            "selector": pause.name,
            "keys": dict(pause.keys),
            "until": iso(pause.until_s),
            "left_s": left_s(pause.until_s, now_s),
            "by": pause.by,
            "at": iso(pause.at_s),
        }
        for pause in rules.pauses()
    ]
    return {"enforced": rules.is_enforced, "paused": paused}
