"""Quotas: who is bounded by which rule, and for how long a response waits to keep the bound.

Sans-I/O: time is an argument in monotonic milliseconds; knows nothing of sockets.
"""

from .client_quotas import ClientQuotas, ThrottleTime, longest
from .delay_queue import Delayed, DelayQueue, Reaper, TimerHandle
from .entities import DEFAULT, ClientIdentity, QuotaKind
from .manager import MeasuredRate, OnState, QuotaManager
from .meter import QuotaRow
from .rule_registry import RuleEntry, RuleOrigin, RuleRegistry
from .rules import OTHER, CandidateRule, Match, QuotaSettings, Rule, RuleTable
from .selector import parse_selector, selector

__all__ = [
    "DEFAULT",
    "OTHER",
    "CandidateRule",
    "ClientIdentity",
    "ClientQuotas",
    "DelayQueue",
    "Delayed",
    "Match",
    "MeasuredRate",
    "OnState",
    "QuotaKind",
    "QuotaManager",
    "QuotaRow",
    "QuotaSettings",
    "Reaper",
    "Rule",
    "RuleEntry",
    "RuleOrigin",
    "RuleRegistry",
    "RuleTable",
    "ThrottleTime",
    "TimerHandle",
    "longest",
    "parse_selector",
    "selector",
]
