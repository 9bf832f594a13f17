"""Clamp the log ends that a query's driver looks up, so that its next batch has the right size.

Structured Streaming plans a batch up to the latest offsets that the driver gets at the trigger. A
driver that gets less plans less; one that gets less than before takes it for lost data. What is
advertised lies between what the query already knows and the real end, always.
"""

import math

from proxy.progress.query import MAX_PARTITIONS
from proxy.wire.topic_partition import TopicPartition

from .driver_view import MAX_OFFSETS, DriverView
from .drivers import REFUSED_GROWTH, PartitionOffsets

OVERRUN = 1.1
"""A driver that looks up again so many trigger intervals after its last answer, or later, has had a
batch for all that time: it would have waited for a trigger otherwise."""


def advertise(view: DriverView, log_ends: PartitionOffsets) -> tuple[PartitionOffsets, bool]:
    """Return what to advertise in place of these real ends, and whether that is new."""
    connection, drivers, now_ms = view.connection, view.drivers, view.now_ms
    view.measurements.held.add(view.asked_ms, now_ms)
    why = view.why_real()
    if why is None:
        ends = _clamped(view, log_ends)
    else:
        ends, drivers.why, drivers.offsets = log_ends, why, None
    connection.waits_since_ms = None
    is_new, drivers.answered_ms = False, min(drivers.answered_ms, now_ms)
    for key, end in ends.items():
        is_new |= drivers.record_end(key, log_ends[key], end, connection, now_ms)
    connection.answers_ms.append(now_ms)
    return ends, is_new


def _clamped(view: DriverView, log_ends: PartitionOffsets) -> PartitionOffsets:
    drivers = view.drivers
    is_overdue = view.connection.wait_failed or drivers.is_late
    grown = drivers.grown(log_ends)
    fitting, why = _fitting(view, grown)
    after = _after_overrun(view)
    if after is not None and after < fitting:
        fitting = after
        why = f"the batch before, not reported yet, took long: {fitting:,} offsets for the next"
    if view.is_refused:
        more = min(_all_planned(view) * REFUSED_GROWTH, MAX_OFFSETS)
        drivers.least_offsets = max(drivers.least_offsets, more)
        fitting, why = _fitting(view, grown)
        is_overdue = False
    bases: dict[TopicPartition, int] = {}
    lags: dict[TopicPartition, int] = {}
    for key, log_end in _all_log_ends(view, log_ends).items():
        base = view.base(key)
        if key in log_ends:
            done = view.done_by_now(key, is_overdue=is_overdue)
            base = base if done is None else max(base or 0, done)
        if base is not None:
            bases[key], lags[key] = base, max(0, log_end - base)
    parts = apportion(fitting, lags) if fitting else dict.fromkeys(lags, 0)
    offsets = max(fitting, sum(lag > 0 for lag in lags.values())) if fitting else 0
    if offsets > fitting:
        why += f"; each of {offsets:,} partitions gets one"
    has_room = len(drivers.advertised) + len(log_ends) <= MAX_PARTITIONS
    may_begin_low = has_room and view.has_planned_nothing
    ends = dict(log_ends)
    for key in log_ends.keys() & bases.keys():
        known = drivers.advertised.get(key)
        if known is not None or may_begin_low:
            before = known.offset if known is not None else 0
            ends[key] = min(log_ends[key], max(bases[key] + parts[key], before))
    drivers.why, drivers.offsets = why, offsets
    return ends


def _after_overrun(view: DriverView) -> int | None:
    """Return how many offsets are to follow an unreported batch that took long, if it did."""
    ends = view.drivers.advertised
    unreported = [ends[key] for key in view.keys if view.is_unreported(key)]
    planned_ms = max((end.raised_ms for end in unreported), default=math.inf)
    took_ms, query = view.asked_ms - planned_ms, view.query
    if not (view.is_timed and took_ms > OVERRUN * (query.trigger_interval_ms or math.inf)):
        return None
    if any(end.answered_ms > planned_ms for end in unreported):
        return None  # it has looked up since: there was a trigger without a batch
    offsets = _all_planned(view)
    for end in ends.values():  # other brokers may have answered to this trigger before
        if end.previous is not None and end.raised_ms - planned_ms > took_ms / 2:
            offsets -= end.offset - end.previous
    rate = view.measurements.rate_after(offsets, planned_ms, view.asked_ms)
    return None if rate is None else view.per_batch(rate)


def _fitting(view: DriverView, grown: int) -> tuple[int, str]:
    """Return how many offsets the next batch is to have, and why.

    In a slow start it may have all by which the logs have `grown`: a query that keeps up has the
    time for it.
    """
    drivers, rate = view.drivers, view.rate or 0.0
    if rate <= 0:
        return 0, "no batch may begin now"
    fitting = view.per_batch(rate)
    why = f"{rate:,.0f} records/s make {fitting:,} offsets for one batch"
    if rate == drivers.start_rate:
        why += ": nothing is known of its cost yet"
        if grown > fitting:
            fitting = min(grown, view.per_batch(drivers.rate or math.inf))
            why += f"; {fitting:,} have just come in"
    if fitting < drivers.least_offsets:
        fitting = drivers.least_offsets
        why += f"; the driver plans none of so few, {fitting:,} are offered"
    return fitting, why


def _all_planned(view: DriverView) -> int:
    return sum(map(view.planned, view.drivers.advertised))


def _all_log_ends(view: DriverView, log_ends: PartitionOffsets) -> dict[TopicPartition, int]:
    """Return the real ends of all partitions: those looked up, the others as last seen."""
    oldest_ms, known = view.connection.answers_ms[0], view.drivers.advertised
    found = {key: end.log_end for key, end in known.items() if end.answered_ms >= oldest_ms}
    if view.query.run_batches == 0:
        # The first answers of a run: not all brokers have been asked.
        for key, partition in view.query.partitions.items():
            log_end = partition.log.high_watermark
            if log_end is not None and key not in known:
                found[key] = log_end
    return found | dict(log_ends)


def apportion(total: int, lags: PartitionOffsets) -> dict[TopicPartition, int]:
    """Share `total` out in proportion to lag, at least 1 to each partition that has any.

    Both of Spark's own limiters do so: in proportion alone, a partition with little lag would get
    nothing for as long as another has very much. The shares add up to `total` exactly, or to 1 for
    each partition with lag if these are more; none is above its lag. All are 0 or more.

    Those whose part is below 1 get 1; the others share the rest by largest remainders (Hamilton's
    method); of equal remainders the first key in order gets one more.
    """
    whole = sum(lags.values())
    if total >= whole:
        return dict(lags)
    made = {key: min(lag, 1) for key, lag in lags.items()}
    lagging = sorted((lag, key) for key, lag in lags.items() if lag)
    left = max(total, len(lagging))
    small = 0
    # Each of these leaves a smaller part of the rest to those after it.
    while small < len(lagging) and left * lagging[small][0] < whole:
        left -= 1
        whole -= lagging[small][0]
        small += 1
    parts = {key: divmod(left * lag, whole) for lag, key in lagging[small:]}
    made |= {key: part for key, (part, _) in parts.items()}
    spare = left - sum(part for part, _ in parts.values())
    for key in sorted(parts, key=lambda key: (-parts[key][1], key))[:spare]:
        made[key] += 1
    return made
