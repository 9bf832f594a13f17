"""Who is limited, and in what: the quota types with all that is known of them, and the client."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self
from zlib import crc32

from .values import format_size, number_parser, parse_count, parse_size

DEFAULT = "<default>"
"""As `user`: any authenticated user. As `client_id`: any client id, also an absent one."""

MAX_CLIENT_ID_CHARS = 255
"""A longer client id is known by its start and a checksum: it goes into labels and log lines."""

BUSY_MS_PER_PERCENT = 10.0
"""Busy milliseconds in a second that are one percent of it."""


@dataclass(frozen=True, slots=True)
class BoundUnit:
    """What the bound of a quota type is measured in."""

    name: str
    parse: Callable[[object], float]
    """Reads a bound as people write it. Raises BadValueError."""
    format: Callable[[float], str]


BYTE_RATE = BoundUnit(
    "bytes_per_second", parse_size, lambda bound: f"{format_size(round(bound))} per second"
)
PERCENTAGE = BoundUnit(
    "percent",
    number_parser("a percentage", "write a number above 0 without a sign, such as 50"),
    lambda bound: f"{bound:g} %",
)

CONNECTION_COUNT = BoundUnit("connections", parse_count, lambda bound: f"{bound:.0f} connections")
CONNECTIONS_PER_SECOND = BoundUnit(
    "connections_per_second",
    number_parser("a rate", "write connections per second without quotes, such as 10"),
    lambda bound: f"{bound:g} connections per second",
)


class QuotaKind(StrEnum):
    """A quota type; the value is the key in the configuration and the label `quota`."""

    label: str
    """For the terminal."""
    unit: BoundUnit
    is_time: bool
    """Whether busy time is charged, of which, as with Kafka, one window at most is owed."""

    CONSUMER_BYTE_RATE = "consumer_byte_rate", "consumer", BYTE_RATE
    """Bytes of Fetch responses per second."""
    PRODUCER_BYTE_RATE = "producer_byte_rate", "producer", BYTE_RATE
    """Bytes of Produce requests per second."""
    REQUEST_PERCENTAGE = "request_percentage", "requests", PERCENTAGE
    """Share of time that requests occupy the upstream; 100: a connection that always waits."""
    MAX_CONNECTIONS = "max_connections", "connections", CONNECTION_COUNT
    """Connections that are open at the same time; a further one is closed."""
    CONNECTION_RATE = "connection_rate", "new connections", CONNECTIONS_PER_SECOND
    """Connections per second; a further one waits before its first request is taken (KIP-612)."""

    def __new__(cls, key: str, label: str = "", unit: BoundUnit = BYTE_RATE) -> Self:  # noqa: D102
        kind = str.__new__(cls, key)
        kind._value_ = key
        kind.label, kind.unit, kind.is_time = label, unit, unit is PERCENTAGE
        return kind

    # Enum hashes the member's name in Python; a lookup by kind is on the path of every response.
    __hash__ = str.__hash__


CONSUMER_BYTE_RATE = QuotaKind.CONSUMER_BYTE_RATE
PRODUCER_BYTE_RATE = QuotaKind.PRODUCER_BYTE_RATE
REQUEST_PERCENTAGE = QuotaKind.REQUEST_PERCENTAGE
MAX_CONNECTIONS = QuotaKind.MAX_CONNECTIONS
CONNECTION_RATE = QuotaKind.CONNECTION_RATE
"""By themselves, for the path of every frame: from its class a member takes ten times as long."""

TRAFFIC_KINDS = tuple(
    kind for kind in QuotaKind if kind.unit not in (CONNECTION_COUNT, CONNECTIONS_PER_SECOND)
)
"""What sensors measure. Whom none of them bounds may take what it wants on its connections."""

FORESEEN_KINDS = frozenset({CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE})
"""Of which a frame's length says what it costs. Frames of clients with a rule for any other one are
all charged by themselves."""


class ClientIdentity(NamedTuple):
    """What is known of the client behind a request."""

    listener: str
    user: str | None
    """None for an anonymous connection."""
    client_id: str | None
    """From the request header; None when that carries a null."""


def shortened_client_id(client_id: str | None) -> str | None:
    """Return a client id as quotas know it."""
    if client_id is None or len(client_id) <= MAX_CLIENT_ID_CHARS:
        return client_id
    return f"{client_id[:MAX_CLIENT_ID_CHARS]}~{crc32(client_id.encode()):08x}"
