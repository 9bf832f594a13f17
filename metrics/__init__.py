"""Windowed sensors with quotas, and how they are shown to Prometheus.

Pure: no I/O, no event loop, nothing of the proxy; time is an argument in monotonic milliseconds.
"""

from .exposition import join_scrapes
from .instruments import BoundedLabels, Instruments, MemberInstruments, UsageInstruments
from .lock_free import CounterChild, HistogramChild
from .sensor import QuotaViolation, Sensor
from .stats import MetricConfig, Quota, Rate, WindowedSum

__all__ = [
    "BoundedLabels",
    "CounterChild",
    "HistogramChild",
    "Instruments",
    "MemberInstruments",
    "MetricConfig",
    "Quota",
    "QuotaViolation",
    "Rate",
    "Sensor",
    "UsageInstruments",
    "WindowedSum",
    "join_scrapes",
]
