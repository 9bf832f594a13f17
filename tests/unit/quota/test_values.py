"""Values that are far too long are refused at once: to compute with them takes minutes."""

import pytest

from proxy.quota.entities import CONNECTION_RATE, REQUEST_PERCENTAGE
from proxy.quota.values import (
    MIN_NUMBER,
    BadValueError,
    number_parser,
    parse_count,
    parse_duration,
    parse_size,
)

LONG = "9" * 1_000_000
LONGEST_FIX = 200


@pytest.mark.parametrize(
    "value",
    [LONG, LONG + "mb", LONG + "MiB", LONG + " s", f"1.{LONG}s", f"1.{LONG}MB", 1 << 10_000_000],
    ids=["digits", "no unit", "size", "spaced", "seconds", "fraction", "number"],
)
@pytest.mark.parametrize(
    "parse", [parse_size, parse_duration, parse_count, number_parser("a rate", "write one")]
)
def test_a_value_of_a_million_digits_is_refused(parse, value):
    with pytest.raises(BadValueError) as caught:
        parse(value)
    assert len(caught.value.fix) < LONGEST_FIX


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1", 1), ("1.5GiB", 1_610_612_736), ("0." + "0" * 38 + "1kB", None), ("0" * 39 + "7", 7)],
)
def test_what_has_room_for_its_digits_is_read(text, size_bytes):
    if size_bytes is None:
        with pytest.raises(BadValueError, match="is not above 0 bytes"):
            parse_size(text)
    else:
        assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "parse",
    [
        REQUEST_PERCENTAGE.unit.parse,
        CONNECTION_RATE.unit.parse,
        number_parser("a weight", "write one"),
        number_parser("a gain", "write one", zero=True),
    ],
)
@pytest.mark.parametrize("value", [1e-310, "1e-310", 1e-320, 1e-300, 0.9e-9])
def test_a_number_that_would_divide_to_infinity_is_refused(parse, value):
    with pytest.raises(BadValueError, match="is too small") as caught:
        parse(value)
    assert caught.value.fix == "write at least 0.000000001"
    assert parse(MIN_NUMBER) == MIN_NUMBER
