"""What the wire modules raise when bytes are not the Kafka protocol."""

from typing import Literal

FrameFault = Literal[
    "negative_length",
    "too_long",
    "too_short",
    "tls_on_plain_port",
    "http_on_plain_port",
    "bad_header",
    "bad_body",
]
"""Why a request was not understood. A small fixed set, so it can be a metric label."""


class MalformedFrame(ValueError):  # noqa: N818 - named for what was found, as in the logs
    """A client sent bytes that are not a Kafka request; its connection has to be closed."""

    def __init__(self, reason: FrameFault, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class MalformedResponse(ValueError):  # noqa: N818 - see MalformedFrame
    """A broker's response does not follow the schema of its API and version."""
