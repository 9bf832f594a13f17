"""Say for each gauge what several members of one machine show together.

Counters and histograms are added, always. A gauge needs a line here: a test compares the table with
what a running proxy shows.
"""

from collections.abc import Mapping
from enum import StrEnum

from .exposition import BOUND_METRIC, PREFIX


class GaugeRule(StrEnum):
    """What becomes of the values that members show for one series."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"
    OWNED = "max, `other` is added"
    """MAX, for things with one owner, of which other members may show a part or what was. But those
    without room, which are shown as `other`, are different ones at each member: SUM."""


SUM, MIN, MAX, OWNED = GaugeRule

_OF_THE_PROXY: Mapping[str, GaugeRule] = {
    # The owner of a client is charged with what the client takes elsewhere: its rate is the whole
    # one, and that of another member a part of it. So the highest is right, and a sum is too much.
    "rate_bytes": OWNED,
    # The same rules hold at all members. An adapted bound is below the rule's, which a member may
    # show that owned the client before; `adaptive_bound_bytes` is that of the owner alone.
    BOUND_METRIC: OWNED,
    "expected_throttling": MAX,
    "adaptive_bound_bytes": MAX,
    "pid_bound_bytes": MAX,
    "spark_report_age_seconds": MAX,
    "stage_state": MAX,
    "stage_rate": MAX,
    # Of the owner alone, too.
    "adaptive_withheld_records": MAX,
    "ledger_pending": MAX,
    # Offsets only grow: of a query that has just changed its owner, the newer ones.
    "partition_position": OWNED,
    "partition_high_watermark": OWNED,
    "partition_committed": OWNED,
    "partition_lag": OWNED,
    "partition_lag_seconds": MAX,
    "partition_stuck": OWNED,
    # A member that has just lost a query may show it for a moment.
    "query_trigger_seconds": MAX,
    "query_failed": OWNED,
    "query_advice": OWNED,
    "delay_queue_size": SUM,
    "kept_bytes": SUM,
    "kept_bytes_waiting": SUM,
    "connections": SUM,
    # Each worker lets in so many: who divides gets the share in use.
    "connections_limit": SUM,
    "silent_connections": SUM,
    "unbounded_clients": SUM,
    "overflow_clients": SUM,
    # All have the same brokers, and equal shares of the ports.
    "brokers_without_port": MAX,
    # What is wrong with one member is wrong with some of the clients.
    "ready": MIN,
    "cluster_reachable": MIN,
    "login_refused": MAX,
    "state_writable": MIN,
    "config_last_reload_successful": MIN,
    # One that has not taken a renewed certificate goes on showing the old one to its clients.
    "certificate_not_after_timestamp_seconds": MIN,
    "throttling_paused": MAX,
    "rules_not_enforced": MAX,
    "rules_digest": MAX,
    "build_info": MAX,
    # Of the supervisor alone, so that there is one value.
    "workers": SUM,
    "workers_crash_looping": SUM,
    "slots_owned": MAX,
    "slots_overloaded": MAX,
    "members_silent": MAX,
    "tier_generation": MAX,
}

GAUGE_RULES: Mapping[str, GaugeRule] = {
    **{PREFIX + name: rule for name, rule in _OF_THE_PROXY.items()},
    # prometheus_client's own, of each process.
    "process_virtual_memory_bytes": SUM,
    "process_resident_memory_bytes": SUM,
    "process_start_time_seconds": MIN,
    # As the open ones are added, so is what may be open: who divides gets the share in use.
    "process_open_fds": SUM,
    "process_max_fds": SUM,
    "python_info": MAX,
}
"""By the name that is exposed."""

_CREATED = "_created"


def gauge_rule(name: str) -> GaugeRule:
    """Return the rule of a gauge: of the time when a series began MIN, of unknown ones MAX."""
    return GAUGE_RULES.get(name, MIN if name.endswith(_CREATED) else MAX)
