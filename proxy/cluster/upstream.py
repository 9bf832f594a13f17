"""Why a broker could not be asked, and Kafka's names of errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from kafka.errors import kafka_errors

Address: TypeAlias = tuple[str, int]
"""Host and port."""

LOGIN_REFUSED = "login_refused"
"""The reason when a broker does not let the proxy itself in."""

LOCAL = "local"
"""The reason when this machine could not even try; it says nothing about the broker."""

LOOP = "loop"
"""The reason when an address leads to this proxy itself."""

CONNECTION_CLOSED = "closed"
"""The reason when a connection broke, or the broker closed it, without an answer."""

NOT_READY = "not_ready"
"""The reason when a broker answered that it, or another one, is to be asked again later."""

UNKNOWN_TOPIC = 3
"""Kafka's error code of a topic that there is not."""


class UpstreamError(Exception):
    """A broker could not be asked. `reason` is from a small set, fit for a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class NonRetriableError(Exception):
    """A broker said no, and will again."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


@contextmanager
def misread_is_bad_response() -> Iterator[None]:
    """Raise UpstreamError for what reading an answer raises that follows its schema, and is none.

    Such as one with null in place of a list, or without what was asked for.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"an answer that makes no sense: {type(error).__name__}, {error}"
        raise UpstreamError("bad_response", text) from error


def explain_self_loop(address: Address) -> str:
    """Return, for people, that an address leads to this proxy itself, and how to mend it."""
    fix = "name brokers in cluster.bootstrap_servers, and in the brokers' advertised.listeners"
    return f"{address[0]}:{address[1]} is this proxy itself; fix: {fix}"


def error_name(error_code: int) -> str:
    """Return Kafka's name of an error, such as NOT_COORDINATOR."""
    error = kafka_errors.get(error_code)
    return f"error {error_code}" if error is None else str(error.message)
