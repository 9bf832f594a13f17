"""Windowed sensors with quotas, and how they are shown to Prometheus.

Pure: no I/O, no event loop, nothing of the proxy; time is an argument in monotonic milliseconds.
"""

from .exposition import join_scrapes
from .instruments import BoundedLabels, Instruments, MemberInstruments, UsageInstruments
from .lock_free import CounterChild, HistogramChild
from .sensor import Metric, QuotaViolation, Registry, Sensor
from .stats import Count, MetricConfig, Quota, Rate, WindowedSum

__all__ = [
    "BoundedLabels",
    "Count",
    "CounterChild",
    "HistogramChild",
    "Instruments",
    "MemberInstruments",
    "Metric",
    "MetricConfig",
    "Quota",
    "QuotaViolation",
    "Rate",
    "Registry",
    "Sensor",
    "UsageInstruments",
    "WindowedSum",
    "join_scrapes",
]
