"""Quotas: who is bounded by which rule, and for how long a response waits to keep the bound.

Sans-I/O: time is an argument in monotonic milliseconds; knows nothing of sockets.
"""

from .delay_queue import Delayed, DelayQueue, Reaper, TimerHandle
from .entities import ClientIdentity, QuotaKind
from .manager import Charge, ClientQuotas, QuotaManager, QuotaRow, QuotaSettings, largest
from .rules import DEFAULT, OTHER, Considered, Match, Rule, RuleTable

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
    "QuotaKind",
    "QuotaManager",
    "QuotaRow",
    "QuotaSettings",
    "Reaper",
    "Rule",
    "RuleTable",
    "TimerHandle",
    "largest",
]
