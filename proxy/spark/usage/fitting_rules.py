"""Suggests rules that fit what was used for months, in the form of `quota-proxy suggest`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .usage_figures import PERCENTILES, Client, Usage, UsageFigures

RULE_HEADROOM = 1.5  # of the p99: what a bound is before it is rounded up
LEAST_BOUND = 100 * 1024  # no bound is lower: it lets a few record batches through in a second
BOUND_KEYS = {"read": "consumer_byte_rate", "write": "producer_byte_rate"}
KIBIBYTE, BOUND_UNITS = 1024, ("KiB", "MiB", "GiB")


def bound_text(rate: float) -> str:
    """Return the next size of two digits that is no lower than a rate in bytes per second."""
    size = max(rate, LEAST_BOUND) / KIBIBYTE
    for unit in BOUND_UNITS:
        step = 10 ** (len(str(int(size))) - 2)  # of one digit: tenths
        rounded = round(math.ceil(round(size / step, 9)) * step, 1)
        if rounded < KIBIBYTE or unit == BOUND_UNITS[-1]:
            break
        size /= KIBIBYTE
    return (
        f"{rounded:.1f}".rstrip("0").rstrip(".") + unit if rounded % 1 else f"{rounded:.0f}{unit}"
    )


def rule_lines(figures: UsageFigures) -> Iterator[str]:
    """Yield the lines of a `quotas` section, with the figures behind each rule as comments."""
    yield f"# Suggested from what passed from {figures.first} to {figures.last}."
    yield f"# A bound is the p99 of the client's rates, times {RULE_HEADROOM:g}, up to two digits."
    yield "# A rate is that of 10 s with traffic; percentiles are at most 5 % high."
    yield "# What goes over a bound waits: see whether a peak is worth a higher one."
    yield "# To try the rules without holding anybody, write throttle: {enforce: false}."
    named = [each for each in figures.clients if _can_be_named(each)]
    if left_off := len(figures.clients) - len(named):
        yield f"# Left off: {left_off} clients whose name is hashed, or none of their own."
    yield "quotas:"
    yield "  rules:" if named else "  rules: []"
    for usage in named:
        client, rates = Client.of(usage.team), usage._asdict()
        keys = {"user": client.user} if client.user else {}
        keys["client-id-prefix" if client.is_prefix else "client-id"] = client.name
        lines = [f"{key}: {_yaml_text(value)}" for key, value in keys.items()]
        lines += ["scope: shared"] if client.is_prefix else []
        yield ""
        for direction, bound in BOUND_KEYS.items():
            if rates[f"{direction}_p99"]:
                names = (*PERCENTILES, "peak")
                seen = ", ".join(f"{name} {rates[f'{direction}_{name}']}" for name in names)
                yield f"    # {bound}: {seen} bytes/s"
                most = rates[f"{direction}_p99"] * RULE_HEADROOM
                lines.append(f"{bound}: {bound_text(most)}")
        for number, line in enumerate(lines):
            yield f"    {' ' if number else '-'} {line}"


def _can_be_named(usage: Usage) -> bool:
    name = Client.of(usage.team).name
    return name not in ("", "<default>") and not usage.hashed and usage.busy_seconds > 0


def _yaml_text(text: str) -> str:
    """Write text in quotes: nothing in it ends the line or is not seen."""
    escaped = (
        f"\\{char}" if char in '"\\' else char if char.isprintable() else f"\\U{ord(char):08X}"
        for char in text
    )
    return f'"{"".join(escaped)}"'
