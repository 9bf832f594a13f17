"""What is written of a client's usage in one interval; docs/usage.md describes it for users."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field

from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, QuotaKind
from proxy.relay.clients import Direction

SCHEMA_VERSION = 1
BUCKET_GROWTH = 1.05
"""A bucket's upper edge is so many times its lower one: the error of a quantile."""

KIND_OF: Mapping[Direction, QuotaKind] = {
    "read": CONSUMER_BYTE_RATE,
    "write": PRODUCER_BYTE_RATE,
}

MAX_BUCKET = 1000
"""1.05^1000 bytes/s are more than there can be: who writes to the topic may write anything."""

MAX_RATES = 10**6  # of a bucket in one record, which months without a cluster sum up to

Bucket: TypeAlias = Annotated[int, Field(ge=-MAX_BUCKET, le=MAX_BUCKET)]

UsageKey: TypeAlias = tuple[str | None, ...]
"""What records have in common that may be summed up: all but time and figures."""


class UsageRecord(BaseModel):
    """What one client has moved in [start_ms, end_ms), of one topic in one direction.

    Of several records of an interval, client and direction the first alone has connections,
    held_seconds, would_be_seconds, rates and peak: all figures add up.
    """

    schema_version: Literal[1] = 1
    member: str = Field(description="The process that wrote it, HOST/N.")
    epoch: int = Field(
        ge=0, description="When that process began to meter, in milliseconds since 1970."
    )
    sequence: int = Field(
        ge=0,
        description="Numbers the records of member and epoch. One that is missing was lost, or is "
        "not there yet.",
    )
    start_ms: int = Field(ge=0)
    end_ms: int = Field(ge=0)
    listener: str
    user: str | None = Field(description="Null: without a login.")
    client_id: str
    hashed: bool = Field(
        description="Whether user, client_id and rule are HMAC-SHA256 of the names, in hexadecimal "
        "digits."
    )
    rule: str | None = Field(
        description="The keys of the rule that bounds this direction; null: none does."
    )
    budget: str | None
    topic: str | None = Field(
        description="Null: bytes of no topic, such as heads and other requests than Fetch and "
        "Produce."
    )
    direction: Direction = Field(
        description="Write: of Produce, requests and answers. Read: of all else."
    )
    bytes: int = Field(ge=0, lt=2**63)
    requests: int = Field(ge=0)
    connections: int = Field(ge=0, description="That were opened.")
    held_seconds: float = Field(ge=0)
    would_be_seconds: float = Field(
        ge=0, description="In which a quota was exceeded that is not enforced."
    )
    sampled: bool = Field(description="Whether the parts of topics are estimates.")
    rates: dict[Bucket, Annotated[int, Field(ge=0, le=MAX_RATES)]] = Field(
        description="How often a rate of 10 s, in bytes per second, was in each bucket b: above "
        "1.05^(b-1), up to 1.05^b."
    )
    peak: float = Field(ge=0, allow_inf_nan=False, description="The highest of these rates.")

    @property
    def summed_by(self) -> UsageKey:
        """Return what it has in common with those that it may be summed up with."""
        names = self.listener, self.user, self.client_id, self.rule, self.budget, self.topic
        return *names, self.direction

    def include(self, later: "UsageRecord") -> None:
        """Add what another one of the same key has."""
        self.start_ms = min(self.start_ms, later.start_ms)
        self.end_ms = max(self.end_ms, later.end_ms)
        self.bytes += later.bytes
        self.requests += later.requests
        self.connections += later.connections
        self.held_seconds += later.held_seconds
        self.would_be_seconds += later.would_be_seconds
        self.sampled |= later.sampled
        for bucket, count in later.rates.items():
            self.rates[bucket] = self.rates.get(bucket, 0) + count
        self.peak = max(self.peak, later.peak)


def client_message_key(record: UsageRecord) -> bytes:
    """Return the key of a record's message: one client's records are in one partition."""
    key = record.listener, record.user, record.client_id
    return json.dumps(key, ensure_ascii=False, separators=(",", ":")).encode()


def rate_bucket_of(rate: float) -> int:
    """Return the bucket of a rate above 0."""
    return math.ceil(math.log(rate) / math.log(BUCKET_GROWTH))


def quantile_of(counts: Mapping[int, int], share: float, peak: float) -> float:
    """Return a rate that this share, 0 to 1, of rates does not exceed; 0 without any.

    At most 5 % above the lowest such rate, and never above the peak.
    """
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return min(BUCKET_GROWTH**bucket, peak)
    return peak


def rates_descending(rates: Mapping[int, int]) -> Iterable[float]:
    """Yield the rates of a sketch, the highest first, as the upper edges of their buckets."""
    for bucket in sorted(rates, reverse=True):
        for _ in range(rates[bucket]):
            yield BUCKET_GROWTH**bucket
