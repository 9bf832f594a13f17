"""What the file says of when rules and budgets are in force."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Annotated

from pydantic import BeforeValidator, Field

from proxy.config import fields
from proxy.config.document import Loc
from proxy.config.fields import Conflict
from proxy.quota.schedules import Schedule, parse_days, parse_end, parse_time, parse_timezone

_ALWAYS = Schedule()


class ScheduleSection(fields.Section):
    """At which times of a week something is in force."""

    days: Annotated[tuple[str, ...], BeforeValidator(parse_days)] = _ALWAYS.days
    begin: Annotated[str, BeforeValidator(parse_time)] = Field(default=_ALWAYS.begin, alias="from")
    end: Annotated[str, BeforeValidator(parse_end)] = Field(default=_ALWAYS.end, alias="to")
    timezone: Annotated[str, BeforeValidator(parse_timezone)] = _ALWAYS.timezone

    def find_conflicts(self) -> Iterator[Conflict]:  # noqa: D102
        if not self.model_fields_set:
            yield Conflict((), "is empty", "add days, or from and to; or remove it")

    @property
    def schedule(self) -> Schedule:
        """What the quota takes."""
        return Schedule(**self.model_dump())


def find_overlapping(
    scheduled: Iterable[tuple[Loc, Hashable, ScheduleSection]],
) -> Iterator[tuple[Loc, Loc]]:
    """Yield where something is in force while what is for the same is, and where that stands."""
    year = datetime.now(UTC).year
    seen: defaultdict[Hashable, list[tuple[Loc, Schedule]]] = defaultdict(list)
    for loc, subject, section in scheduled:
        schedule, others = section.schedule, seen[subject]
        other = next((loc for loc, each in others if schedule.overlaps(each, year)), None)
        if other is not None:
            yield loc, other
        others.append((loc, schedule))
