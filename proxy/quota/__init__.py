"""Quotas: who is bounded by which rule, and for how long a response waits to keep the bound.

Sans-I/O: time is an argument in monotonic milliseconds; knows nothing of sockets.
"""

from .client import Charge, ClientQuotas, largest
from .delay_queue import Delayed, DelayQueue, Reaper, TimerHandle
from .entities import ClientIdentity, QuotaKind
from .manager import OnState, QuotaManager, Reading
from .meter import QuotaRow
from .rulebook import RuleBook, RuleEntry, RuleSource
from .rules import DEFAULT, OTHER, Considered, Match, Rule, RuleTable
from .selector import parse_selector, selector
from .settings import QuotaSettings

__all__ = [
    "DEFAULT",
    "OTHER",
    "Charge",
    "ClientIdentity",
    "ClientQuotas",
    "Considered",
    "DelayQueue",
    "Delayed",
    "Match",
    "OnState",
    "QuotaKind",
    "QuotaManager",
    "QuotaRow",
    "QuotaSettings",
    "Reading",
    "Reaper",
    "Rule",
    "RuleBook",
    "RuleEntry",
    "RuleSource",
    "RuleTable",
    "TimerHandle",
    "largest",
    "parse_selector",
    "selector",
]
