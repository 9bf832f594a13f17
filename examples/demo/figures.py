"""Reads what the proxy measures from its `/metrics`, as any user's monitoring does."""

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

from metrics.exposition import PREFIX

LIMITED = "spark-limited"
"""Client id of the query; examples/demo.yaml has its quota."""
UNLIMITED = "unlimited"
"""Client id of the consumer beside it, which no rule fits."""

QUOTA = "consumer_byte_rate"
SCRAPE_TIMEOUT_S = 10.0
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """What one scrape found; totals are since the proxy's start."""

    at_s: float
    """Time of the scrape, from a monotonic clock."""
    limited_bytes: float
    """Total that the query fetched."""
    unlimited_bytes: float
    """Total that the client without quota fetched."""
    rate_bytes: float
    """The query's rate per second, as the proxy's sensor measures it over its windows."""
    bound_bytes: float
    """The query's bound per second; 0 until it has fetched anything."""
    holds: int
    """How many responses were held in total."""
    held_s: float
    """For how long they were held in total."""
    queued: int
    """Responses that are held at this moment."""


@dataclass(frozen=True, slots=True)
class Second:
    """What happened between two samples, about a second; rates in bytes per second."""

    at_s: float
    """Middle of the interval, from the clock of the samples."""
    limited_rate: float
    unlimited_rate: float
    throttle_s: float
    """Mean time for which a response was held; 0 when none was."""


def scrape(url: str, at_s: float) -> Sample:
    """Read `/metrics` at `url`; what is not there is 0. Raises OSError without an answer."""
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as response:
        text = response.read().decode()
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for line in family.samples:
            labels = line.labels
            # Each metric that is wanted has one of these, or two of which this one comes first.
            key = labels.get("client_id") or labels.get("quota") or labels.get("api") or ""
            if labels.get("api") in (None, "Fetch", "fetch") and "le" not in labels:
                found[line.name.removeprefix(PREFIX), key] = line.value

    def value(name: str, key: str) -> float:
        return found.get((name, key), 0.0)

    return Sample(
        at_s=at_s,
        limited_bytes=value("bytes_total", LIMITED),
        unlimited_bytes=value("bytes_total", UNLIMITED),
        rate_bytes=value("rate_bytes", QUOTA),
        bound_bytes=value("bound_bytes", QUOTA),
        holds=int(value("throttle_seconds_count", QUOTA)),
        held_s=value("throttle_seconds_sum", QUOTA),
        queued=int(value("delay_queue_size", "fetch")),
    )


def rate_text(bytes_per_second: float) -> str:
    """Write a rate for people."""
    return f"{bytes_per_second / MIB:.2f} MiB/s"


def seconds(samples: Sequence[Sample]) -> list[Second]:
    """Give what happened between each sample and the next one."""
    return [
        Second(
            at_s=(before.at_s + after.at_s) / 2,
            limited_rate=(after.limited_bytes - before.limited_bytes) / (after.at_s - before.at_s),
            unlimited_rate=(after.unlimited_bytes - before.unlimited_bytes)
            / (after.at_s - before.at_s),
            throttle_s=(after.held_s - before.held_s) / max(after.holds - before.holds, 1),
        )
        for before, after in pairwise(samples)
    ]


def average_while_held(samples: Sequence[Sample]) -> tuple[float, float] | None:
    """Return the query's bytes per second from the first to the last hold, and that time in s.

    None without two holds.

    What came before the first hold is left out: a client that was idle has the windows' time times
    its bound in hand, as with Kafka's own quotas.
    """
    first = next((sample for sample in samples if sample.holds), None)
    held = [after for before, after in pairwise(samples) if after.holds > before.holds]
    if first is None or not held or held[-1].at_s <= first.at_s:
        return None
    last = held[-1]
    duration_s = last.at_s - first.at_s
    return (last.limited_bytes - first.limited_bytes) / duration_s, duration_s
