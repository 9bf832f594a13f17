"""Who is limited, and in what: the kinds of quota and the identity of a client."""

from dataclasses import dataclass
from enum import StrEnum


class QuotaKind(StrEnum):
    """What a quota limits; the value is the key in the configuration and the label `quota`."""

    CONSUMER_BYTE_RATE = "consumer_byte_rate"
    """Bytes of Fetch responses per second."""

    PRODUCER_BYTE_RATE = "producer_byte_rate"
    """Bytes of Produce requests per second."""

    REQUEST_PERCENTAGE = "request_percentage"
    """Share of time in which the client's requests occupy the upstream; 100 is one connection
    that always waits for an answer."""

    # Enum hashes the member's name in Python; a lookup by kind is on the path of every response.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """What is known of the client behind a request."""

    listener: str
    """Name of the listener that it came in by."""

    user: str | None
    """Authenticated user; None for an anonymous connection."""

    client_id: str | None
    """Client id from the request header; None when the header carries a null."""
