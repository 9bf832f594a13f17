"""What the command `check` prints of schedules: what is not in force, and when it is."""

from collections.abc import Iterator
from datetime import UTC, datetime

from proxy.quota.rules import Budget, QuotaSettings
from proxy.quota.scheduled_rules import ScheduledSettings, parts_of


def explain_schedules(settings: QuotaSettings, at_s: float) -> Iterator[str]:
    """Yield a line for each rule and budget that is not in force at a time of the Unix epoch."""
    now, at = ScheduledSettings.at(settings, at_s), datetime.fromtimestamp(at_s, UTC)
    in_force = {frozenset(rule.keys.items()): rule for rule in now.settings.rules}
    numbers = {rule.number for rule in now.settings.rules}
    for title, part in parts_of(settings.rules).items():
        if part.when is not None and not now.scheduled[title]:
            begin = part.when.next_change(at)
            then = "" if begin is None else f"; it is from {part.when.clock(begin)} on"
            then += f" ({part.when})"
        elif isinstance(part, Budget) or part.number in numbers:
            continue
        elif (other := in_force.get(frozenset(part.keys.items()))) and other.when is not None:
            then = f": {other.title} is for the same clients, and goes first ({other.when})"
        else:
            then = ": no budget that it is in has a rate then, and it has none of its own"
        yield f"{title} is not in force at {at:%Y-%m-%dT%H:%MZ}{then}"
