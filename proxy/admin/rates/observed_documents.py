"""Writes and reads what was observed of clients, to add up what several processes have seen."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.admin.rates.observed_rates import ObservedClient, ObservedRates, RateSeries
from proxy.admin.rates.rate_sketch import RateSketch
from proxy.quota.entities import ClientIdentity, QuotaKind


@dataclass(slots=True)
class Observed:
    """What was seen from an hour on."""

    sketches: dict[RateSeries, RateSketch] = field(default_factory=dict)
    examples: dict[ObservedClient, ClientIdentity] = field(default_factory=dict)
    """A client of each."""
    left_out: int = 0
    """How many clients there was no room for, at least."""

    def add(self, series: RateSeries, sketch: RateSketch, example: ClientIdentity | None) -> None:
        """Add what one process has seen of a series."""
        known = self.sketches.get(series)
        self.sketches[series] = sketch if known is None else RateSketch.merged((known, sketch))
        if example is not None:
            self.examples.setdefault(series.client, example)

    def adding(self, rates: ObservedRates, first_hour: int) -> Iterator[None]:
        """Add in small steps what this process has seen."""
        self.left_out += len(rates.left_out)
        for found in rates.since(first_hour):
            if found is not None:
                series, sketch = found
                self.add(series, sketch, rates.examples.get(series.client))
            yield

    def adding_documents(self, documents: Iterable[Mapping[str, Any]]) -> Iterator[None]:
        """Add in small steps what `documents` of another process are.

        Raises KeyError, TypeError, ValueError for what is no such thing.
        """
        for each in documents:
            client = ObservedClient(each["user"], str(each["name"]), bool(each["is_prefix"]))
            counts = Counter({int(bucket): int(count) for bucket, count in each["counts"]})
            sketch = RateSketch(counts, float(each["peak"]), int(each["total_bytes"]))
            example = ClientIdentity(*each["example"])
            self.add(RateSeries(client, QuotaKind(each["quota"])), sketch, example)
            yield

    def documents(self) -> Iterator[Mapping[str, Any]]:
        """Yield each series for JSON."""
        for (client, kind), sketch in self.sketches.items():
            example = self.examples.get(client)
            if example is not None:
                yield {
                    "user": client.user,
                    "name": client.name,
                    "is_prefix": client.is_prefix,
                    "example": [example.listener, example.user, example.client_id],
                    "quota": str(kind),
                    "counts": list(sketch.counts.items()),
                    "peak": sketch.peak,
                    "total_bytes": sketch.total_bytes,
                }
