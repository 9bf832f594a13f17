"""Schedules, against all minutes of the days around which clocks are changed."""

from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.quota.schedules import DAYS, Schedule, parse_timezone
from proxy.quota.values import BadValueError

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
WEEK = 7 * DAY

CHANGES = {
    "Europe/Berlin": (date(2026, 3, 29), date(2026, 10, 25)),
    "America/New_York": (date(2026, 3, 8), date(2026, 11, 1)),
    "Australia/Lord_Howe": (date(2026, 4, 5), date(2026, 10, 4)),  # by half an hour
    "America/Havana": (date(2026, 3, 8), date(2026, 11, 1)),  # at midnight
    "UTC": (date(2026, 3, 29), date(2026, 10, 25)),
}
AROUND = [(zone, day) for zone, days in CHANGES.items() for day in days]
LOOKED_AT, KNOWN = 2, 5
"""Days before and after such a day: those that are compared, and those whose minutes are known."""

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)  # a Thursday

clocks = st.builds(
    "{:02}:{:02}".format,
    st.integers(0, 23) | st.integers(0, 3),
    st.integers(0, 59) | st.sampled_from([0, 30]),
)
schedules = st.builds(
    Schedule,
    st.lists(st.sampled_from([*DAYS, "mon-sun", "sat-mon"]), min_size=1).map(tuple),
    clocks,
    clocks | st.just("24:00"),
)


@cache
def minutes_around(zone: str, day: date) -> list[datetime]:
    start = datetime(day.year, day.month, day.day, tzinfo=UTC) - KNOWN * DAY
    return [start + minute * MINUTE for minute in range(2 * KNOWN * 24 * 60)]


@cache
def shown_by_clock(zone: str, day: date) -> list[datetime]:
    clock = ZoneInfo(zone)
    return [each.astimezone(clock).replace(tzinfo=None) for each in minutes_around(zone, day)]


@cache
def positions(zone: str, day: date) -> tuple[dict[datetime, int], dict[datetime, int]]:
    """Where in these minutes a clock shows a time first, and last."""
    numbered = list(enumerate(shown_by_clock(zone, day)))
    return {each: at for at, each in reversed(numbered)}, {each: at for at, each in numbered}


def brute_force(schedule: Schedule, day: date) -> list[bool]:
    """Whether each of the minutes is in the schedule."""
    zone = schedule.timezone
    shown = shown_by_clock(zone, day)
    first, last = positions(zone, day)
    found = [False] * len(shown)
    names = {name for each in schedule.days for name in days_named(each)}
    for ahead in range(1 - KNOWN, KNOWN - 1):
        on = datetime.combine(day, time()) + ahead * DAY
        if DAYS[on.weekday()] in names:
            begin, end = (on + time_of(each) for each in (schedule.begin, schedule.end))
            end += DAY if end <= begin else timedelta()
            start = first.get(begin) or next(at for at, each in enumerate(shown) if each > begin)
            stop = last.get(end) or next(
                (at for at, each in enumerate(shown) if each > end), len(shown)
            )
            found[start:stop] = [True] * (stop - start)
    return found


def days_named(text: str) -> list[str]:
    first, _, last = text.partition("-")
    twice = [*DAYS, *DAYS]
    start = twice.index(first)
    return twice[start : twice.index(last or first, start) + 1]


def time_of(clock: str) -> timedelta:
    hours, minutes = map(int, clock.split(":"))
    return timedelta(hours=hours, minutes=minutes)


@pytest.mark.parametrize(("zone", "day"), AROUND)
@given(schedule=schedules)
def test_schedules_are_exact_where_clocks_are_changed(zone, day, schedule):
    schedule = Schedule(schedule.days, schedule.begin, schedule.end, zone)
    minutes, expected = minutes_around(zone, day), brute_force(schedule, day)
    at, stop = (KNOWN - LOOKED_AT) * 24 * 60, (KNOWN + LOOKED_AT) * 24 * 60
    assert schedule.is_in(minutes[at]) is expected[at]
    while at < stop:
        until = next((each for each in range(at, stop) if expected[each] != expected[at]), stop)
        change = schedule.next_change(minutes[at])
        if until == stop:
            assert change is None or change >= minutes[stop]
        else:
            assert change == minutes[until]
            assert schedule.is_in(change) is expected[until]
            assert schedule.is_in(change - timedelta(microseconds=1)) is expected[at]
        at = until


def berlin(days, begin, end):
    return Schedule(days, begin, end, "Europe/Berlin")


def test_a_night_begins_on_its_day():
    night = berlin(("fri",), "22:00", "06:00")
    friday = datetime(2026, 11, 27, 21, tzinfo=UTC)
    assert night.next_change(NOON) == friday
    assert night.next_change(friday) == friday + timedelta(hours=8)
    assert not night.is_in(friday + DAY)


def test_what_is_always_in_force_never_changes():
    assert Schedule().is_in(NOON)
    assert Schedule().next_change(NOON) is None
    assert Schedule(("mon-wed", "thu-sun"), "05:00", "05:00").next_change(NOON) is None


def test_a_time_that_the_clock_leaves_out_is_a_week_later():
    schedule = berlin(("sun",), "02:10", "02:50")
    saturday = datetime(2026, 3, 28, tzinfo=UTC)
    assert schedule.next_change(saturday) == datetime(2026, 4, 5, 0, 10, tzinfo=UTC)


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (berlin(("mon-fri",), "08:00", "18:00"), berlin(("mon-fri",), "18:00", "08:00"), False),
        (berlin(("mon-fri",), "08:00", "18:00"), berlin(("sat-sun",), "00:00", "24:00"), False),
        (berlin(("mon-fri",), "08:00", "18:00"), berlin(("fri-mon",), "00:00", "08:01"), True),
        (berlin(("sun",), "22:00", "06:00"), berlin(("mon",), "05:59", "07:00"), True),
        (berlin(("sun",), "22:00", "06:00"), berlin(("mon",), "06:00", "07:00"), False),
        (berlin(("mon",), "08:00", "09:00"), Schedule(("mon",), "08:00", "10:00"), False),
        (berlin(("mon",), "08:00", "09:00"), Schedule(("mon",), "07:59", "10:00"), True),
        (berlin(("mon",), "08:00", "09:00"), Schedule(("mon",), "06:00", "06:01"), True),
        (berlin(("mon",), "00:00", "01:00"), Schedule(("sun",), "23:30", "23:31"), True),
        (berlin(("mon",), "00:00", "01:00"), Schedule(("mon",), "00:00", "01:00"), False),
    ],
)
def test_two_overlap_where_they_have_a_time_in_common(one, other, overlap):
    assert one.overlaps(other, 2026) is overlap
    assert other.overlaps(one, 2026) is overlap


@given(one=schedules, other=schedules, zone=st.sampled_from(list(CHANGES)))
def test_those_that_do_not_overlap_are_never_both_in_force(one, other, zone):
    other = Schedule(other.days, other.begin, other.end, zone)
    if not one.overlaps(other, 2026):
        at, both = NOON, 0
        while at is not None and at < NOON + WEEK:
            both += one.is_in(at) and other.is_in(at)
            changes = one.next_change(at), other.next_change(at)
            at = min((each for each in changes if each is not None), default=None)
        assert both == 0


@given(schedules)
def test_a_document_is_read_back(schedule):
    assert Schedule.of(schedule.document()) == schedule


@pytest.mark.parametrize("name", ["Europe", "/etc/passwd", "../x", "", "\0", "Mars/Base", None, 2])
def test_other_names_are_no_time_zones(name):
    with pytest.raises(BadValueError, match="no time zone"):
        parse_timezone(name)


def test_it_says_until_when_it_is_in_force_or_when_it_begins():
    schedule = Schedule(("mon-fri",), "08:00", "18:00", "Europe/Berlin")
    told = [schedule.told(datetime(2026, 11, 27, hour, tzinfo=UTC)) for hour in (8, 18)]
    assert told == ["in force until 2026-11-27 18:00+01:00", "begins 2026-11-30 08:00+01:00"]
    assert Schedule().told(datetime(2026, 11, 27, tzinfo=UTC)) == "in force"
