"""What users read of the metrics that a process declares."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from metrics.exposition import PREFIX
from metrics.instruments import Declarations


class InstrumentRow(NamedTuple):
    """One metric, as the documents show it."""

    name: str
    """With its prefix."""
    type: str
    labels: tuple[str, ...]
    meaning: str


def rows_of(instruments: Declarations) -> Iterator[InstrumentRow]:
    for name, declared in vars(type(instruments)).items():
        metric = getattr(instruments, name)
        if hasattr(metric, "describe"):
            (family,) = metric.describe()
            labels = tuple(re.findall(r"\w+", declared.labels))
            yield InstrumentRow(PREFIX + name, family.type, labels, family.documentation)
