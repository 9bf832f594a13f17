"""When a rule or budget is in force: at which times of which days, by the clock of a place."""

import difflib
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import cache, partial
from itertools import product
from typing import Annotated, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from pydantic import BeforeValidator, Field

from proxy.state import JsonDataclass

from .fields import Loc, SettingsBase
from .values import BadValueError, shown

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

DAY_MIN: Final = 24 * 60
WEEK_MIN: Final = len(DAYS) * DAY_MIN

DAY: Final = timedelta(days=1)
MINUTE: Final = timedelta(minutes=1)
SECOND: Final = timedelta(seconds=1)

DAYS_AHEAD: Final = 16
"""In so many days there is a change: a week, and another where a clock leaves out all of a time."""

YEAR_DAYS: Final = 366

_TIME: Final = re.compile(r"([01][0-9]|2[0-3]):[0-5][0-9]", re.ASCII)
_END: Final = "24:00"
_DAYS_FIX: Final = f"write {', '.join(DAYS)}, a range such as mon-fri, or a list of these"


def parse_days(value: object) -> tuple[str, ...]:
    """Return days and ranges of days. Raises BadValueError for anything else."""
    days = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not days:
        raise BadValueError("names no day", _DAYS_FIX)
    for each in days:
        ends = each.split("-") if isinstance(each, str) else [""]
        if len(ends) > 2 or not set(ends) <= set(DAYS):  # noqa: PLR2004 - first and last
            raise BadValueError(f"{shown(each)} is not a day", _DAYS_FIX)
    return days


def parse_time(value: object, latest: str = "23:59") -> str:
    """Return a time of day, up to the latest one. Raises BadValueError for anything else."""
    if isinstance(value, str) and (value == latest or _TIME.fullmatch(value)):
        return value
    fix = f'write hours and minutes in quotes, from "00:00" to "{latest}"'
    raise BadValueError(f"{shown(value)} is not a time of day", fix)


def parse_timezone(value: object) -> str:
    """Return the name of a time zone. Raises BadValueError for one that is not known here."""
    name = value if isinstance(value, str) else ""
    try:
        _zone_of(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # a directory, or no path at all
        known = available_timezones()
        if known:
            nearest = difflib.get_close_matches(name, known, n=1) or ["Europe/Berlin, or UTC"]
            fix = f"write {nearest[0]}"
        else:
            fix = "write UTC, or install the time zones of this system (its package tzdata)"
        raise BadValueError(f"{shown(value)} is no time zone that is known here", fix) from None
    return name


@dataclass(frozen=True, slots=True)
class Schedule(SettingsBase, JsonDataclass):
    """Times of a week by the clock of a time zone; the values are as the functions here read them.

    In place of a time that the clock leaves out stands the one at which it goes on. One that comes
    twice begins the first time, and ends the last time.
    """

    days: Annotated[tuple[str, ...], BeforeValidator(parse_days)] = ("mon-sun",)
    """On which it begins: days and ranges of days."""
    begin: Annotated[str, BeforeValidator(parse_time), Field(alias="from")] = "00:00"
    end: Annotated[str, BeforeValidator(partial(parse_time, latest=_END)), Field(alias="to")] = _END
    """Not included. At or before `begin`: on the next day."""
    timezone: Annotated[str, BeforeValidator(parse_timezone)] = "UTC"

    def __str__(self) -> str:
        return f"{', '.join(self.days)} {self.begin} to {self.end} {self.timezone}"

    def is_in(self, at: datetime) -> bool:
        """Return whether a time, of any zone, is one of its times."""
        return any(begin <= at < end for begin, end in self._windows(at, 2))

    def next_change(self, at: datetime) -> datetime | None:
        """Return when `is_in` changes next after a time; None if it does not in DAYS_AHEAD."""
        was_in = self.is_in(at)
        edges = sorted(edge for window in self._windows(at, DAYS_AHEAD) for edge in window)
        return next((each for each in edges if each > at and self.is_in(each) != was_in), None)

    def told(self, at: datetime) -> str:
        """Return for people until when it is in force at a time, or when it begins."""
        change, is_in = self.next_change(at), self.is_in(at)
        if change is None:
            return "in force" if is_in else "not in force"
        return f"{'in force until' if is_in else 'begins'} {self.clock(change)}"

    def clock(self, at: datetime) -> str:
        """Return a time as the clock of its zone shows it."""
        return at.astimezone(self.zone).isoformat(" ", "minutes")

    def overlaps(self, other: "Schedule", year: int) -> bool:
        """Return whether both have a time in common, as the clocks of their zones go in a year.

        Of one zone they are compared by its clock: where that is changed, one may end a little
        after the other begins.
        """
        days = [datetime(year, 1, 1, tzinfo=UTC) + each * DAY for each in range(YEAR_DAYS)]
        apart = {
            (_offset(other.zone, day) - _offset(self.zone, day)) // MINUTE
            for day in (days if self.timezone != other.timezone else days[:1])
        }
        (begin, end), (its_begin, its_end) = self.span_min, other.span_min
        pairs = product(_days_of(self.days), _days_of(other.days), apart)
        after_min = {
            ((its_day - day) * DAY_MIN + its_begin - begin - clocks_min) % WEEK_MIN
            for day, its_day, clocks_min in pairs
        }
        """After a time of this one has begun, until one of the other does."""
        return any(
            each < end - begin or WEEK_MIN - each < its_end - its_begin for each in after_min
        )

    @property
    def zone(self) -> tzinfo:
        """By whose clock it begins and ends."""
        return _zone_of(self.timezone)

    @property
    def span_min(self) -> tuple[int, int]:
        """When it begins and ends, in minutes of the day on which it begins."""
        begin, end = map(_minutes_of, (self.begin, self.end))
        return begin, end if end > begin else end + DAY_MIN

    def _windows(self, at: datetime, days: int) -> Iterator[tuple[datetime, datetime]]:
        """Yield when it begins and ends, on the days before a time and on some after."""
        zone, weekdays = self.zone, _days_of(self.days)
        begin, end = self.span_min
        today = at.astimezone(zone).date()
        for ahead in range(-2, days):
            day = today + ahead * DAY
            if day.weekday() in weekdays:
                yield _instant(zone, day, begin, fold=0), _instant(zone, day, end, fold=1)


def _not_empty(value: object) -> object:
    if value == {}:
        raise BadValueError("is empty", "add days, or from and to; or remove it")
    return value


When = Annotated[Schedule, BeforeValidator(_not_empty)]
"""A schedule of which something is written."""


def find_overlapping(
    scheduled: Iterable[tuple[Loc, Hashable, Schedule]],
) -> Iterator[tuple[Loc, Loc]]:
    """Yield where something is in force while what is for the same is, and where that stands."""
    year = datetime.now(UTC).year
    seen: defaultdict[Hashable, list[tuple[Loc, Schedule]]] = defaultdict(list)
    for loc, subject, schedule in scheduled:
        others = seen[subject]
        other = next((loc for loc, each in others if schedule.overlaps(each, year)), None)
        if other is not None:
            yield loc, other
        others.append((loc, schedule))


@cache
def _zone_of(name: str) -> tzinfo:
    """Return a time zone, read once; UTC is there on systems that have no others."""
    return UTC if name == "UTC" else ZoneInfo(name)


def _minutes_of(clock: str) -> int:
    hours, _, minutes = clock.partition(":")
    return 60 * int(hours) + int(minutes)


def _days_of(days: tuple[str, ...]) -> set[int]:
    """Return the days of a week, from 0 for Monday; a range may go on after Sunday."""
    found = set[int]()
    for each in days:
        ends = [DAYS.index(name) for name in each.split("-")]
        more = (ends[-1] - ends[0]) % len(DAYS)
        found |= {(ends[0] + day) % len(DAYS) for day in range(more + 1)}
    return found


def _offset(zone: tzinfo, at: datetime) -> timedelta:
    return at.astimezone(zone).utcoffset() or timedelta()


def _instant(zone: tzinfo, day: date, minute: int, *, fold: int) -> datetime:
    """Return when a clock shows a minute of a day, the first time or the last (`fold` 1).

    Of one that it leaves out: when it goes on.
    """
    clock = datetime.combine(day, time()) + minute * MINUTE
    local = clock.replace(tzinfo=zone, fold=fold)
    instant = local.astimezone(UTC)
    if instant.astimezone(zone).replace(tzinfo=None) == clock:
        return instant
    early, late = sorted(local.replace(fold=each).astimezone(UTC) for each in (0, 1))
    after = _offset(zone, late)
    seconds = range((late - early) // SECOND)
    is_after = lambda second: _offset(zone, early + second * SECOND) == after  # noqa: E731
    return early + bisect(seconds, False, key=is_after) * SECOND
