"""Take Prometheus' text format apart, as fast as thousands of clients at several members need it.

What is in a series' labels stays as it is written: nothing is unescaped, so nothing can change. The
text is that of `generate_latest`: each family has HELP and TYPE, samples have no timestamps, and
labels are in one order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HELP, _TYPE = b"# HELP ", b"# TYPE "
_SAMPLE = re.compile(
    rb"^([a-zA-Z_:][\w:]*(?:\{.*\})?) "
    rb"([+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|Inf)|NaN)$",
    re.MULTILINE,
)

Series = bytes
"""Name and labels of a sample, as they are written."""

Values = Mapping[Series, bytes]
"""Of the samples, as they are written, in their order."""


@dataclass(frozen=True, slots=True)
class FamilyText:
    """One family."""

    head: bytes
    """Its HELP and TYPE lines."""
    type: str
    values: Values

    def written(self, values: Values) -> bytes:
        """Return the family's text with these values."""
        return self.head + b"".join([b"%b %b\n" % pair for pair in values.items()])


def read_families(text: bytes) -> dict[str, FamilyText]:
    """Return the families by name, in their order.

    Raises ValueError when the text is not as described above, or is cut off.
    """
    families: dict[str, FamilyText] = {}
    if not text:
        return families
    if not text.startswith(_HELP) or not text.endswith(b"\n"):
        raise ValueError("metrics: the text does not begin with a HELP line, or is cut off")
    # In a label a line's end is escaped: what begins a line is never part of one.
    for block in text[len(_HELP) : -1].split(b"\n" + _HELP):
        help_line, _, rest = block.partition(b"\n")
        type_line, _, samples = rest.partition(b"\n")
        helped = help_line.partition(b" ")[0]
        name, _, kind = type_line.removeprefix(_TYPE).partition(b" ")
        if not type_line.startswith(_TYPE) or name != helped:
            raise ValueError(f"metrics: no TYPE line after the HELP line of {helped!r}")
        values = dict(_SAMPLE.findall(samples))
        lines = samples.count(b"\n") + 1 if samples else 0
        if len(values) != lines or name.decode() in families:
            raise ValueError(f"metrics: {name!r} has {lines} lines, {len(values)} are series")
        head = _HELP + help_line + b"\n" + type_line + b"\n"
        families[name.decode()] = FamilyText(head, kind.decode(), values)
    return families
