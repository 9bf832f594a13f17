"""What the models are made of: a section, and values that are checked when they are read."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from proxy.config import endpoints, files
from proxy.progress.query_scope import ANY_REST
from proxy.quota.entities import DEFAULT
from proxy.quota.validation import parse_prefix
from proxy.quota.values import (
    DURATION_UNITS,
    MAX_COUNT,
    BadValueError,
    number_parser,
    parse_duration,
    parse_duration_or_zero,
    parse_size,
    parse_text,
    shown,
)

MAX_REQUEST_BYTES: Final = 2**31 - 1
"""The longest frame that Kafka's signed 32 bit length can announce."""

MAX_WINDOW_SAMPLES: Final = 1000

Seconds = float
"""A duration in seconds. Kafka counts in milliseconds; who hands one on to it converts."""

MIN_INTERVAL_S: Final = 0.001
"""The shortest batch interval: Spark counts in milliseconds."""

RESERVED_NAMES: Final = {
    "admin": "the token in admin.token_file",
    "local": "those who need no token",
    "file": "the configuration file",
}
"""How others than tokens by name are called, where changes are recorded."""


PATTERN_FIX: Final = "write names of queries, or how they begin, such as team-a-*"


def format_duration(seconds: Seconds) -> str:
    """Write a duration in its largest whole unit; `parse_duration_or_zero` reads it back."""
    exact = Decimal(repr(seconds))
    for name in ("h", "m", "s"):
        count = exact / DURATION_UNITS[name]
        if exact and count == count.to_integral_value():
            return f"{int(count)}{name}"
    return f"{(exact / DURATION_UNITS['ms']).normalize():f}ms"


def format_number(number: float) -> str:
    """Write a finite number in digits alone: 1000000, not 1e6 or 1000000.0."""
    return f"{Decimal(repr(number)).normalize():f}"


def _query_client(value: object) -> str:
    client_id = parse_text(value)
    if client_id == DEFAULT:
        message = f"{DEFAULT} stands for many clients, not for one query"
        raise BadValueError(message, "write the query's kafka.client.id")
    return client_id


def _token_name(value: object) -> str:
    name = parse_text(value)
    if name in RESERVED_NAMES:
        message = f"{shown(name)} is the name of {RESERVED_NAMES[name]}"
        raise BadValueError(message, "choose another name")
    if not name.isprintable():
        raise BadValueError(f"{shown(name)} is not printable", "choose another name")
    return name


def _query_pattern(value: object) -> str:
    pattern = parse_text(value)
    start = pattern.removesuffix(ANY_REST)
    if ANY_REST in start:
        raise BadValueError(f"{shown(value)} has a {ANY_REST} before its end", PATTERN_FIX)
    if not start:
        raise BadValueError(f"{shown(value)} is every query", "remove queries: then it is for all")
    if not pattern.isprintable():
        raise BadValueError(f"{shown(value)} is not printable", PATTERN_FIX)
    return pattern


def _batch_interval(value: object) -> Seconds:
    interval = parse_duration(value)
    if interval < MIN_INTERVAL_S:
        fix = "write the trigger interval of the query, such as 2s"
        raise BadValueError(f"{shown(value)} is shorter than a millisecond", fix)
    return interval


def _frame_size(value: object) -> int:
    size_bytes = parse_size(value)
    if size_bytes > MAX_REQUEST_BYTES:
        message = f"{shown(value)} is longer than a Kafka request can be"
        raise BadValueError(message, "write less than 2GiB")
    return size_bytes


def _whole_number(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        fix = f"write a whole number from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadValueError(f"{shown(value)} is not a whole number", fix)
        if not low <= value <= high:
            raise BadValueError(f"{shown(value)} is out of range", fix)
        return value

    return parse


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, above 0."""
FrameSize = Annotated[int, BeforeValidator(_frame_size)]
Duration = Annotated[Seconds, BeforeValidator(parse_duration)]
"""Seconds, above 0."""
DurationOrZero = Annotated[Seconds, BeforeValidator(parse_duration_or_zero)]
QueryPattern = Annotated[str, BeforeValidator(_query_pattern)]
"""A query's name or client id, or a beginning of it and `*`."""
BatchInterval = Annotated[Seconds, BeforeValidator(_batch_interval)]
"""Seconds, at least `MIN_INTERVAL_S`."""
Count = Annotated[int, BeforeValidator(_whole_number(1, MAX_COUNT))]
Samples = Annotated[int, BeforeValidator(_whole_number(2, MAX_WINDOW_SAMPLES))]
_RATE_FIX = "write records per second without quotes, such as 1000"
RecordRate = Annotated[float, BeforeValidator(number_parser("a rate", _RATE_FIX))]
"""Records per second, above 0."""
_RATE_OR_ZERO = number_parser("a rate", f"{_RATE_FIX}, or 0", zero=True)
RecordRateOrZero = Annotated[float, BeforeValidator(_RATE_OR_ZERO)]
_SHARE = number_parser("a share", "write a number from 0 to below 1, such as 0.5", zero=True)
Share = Annotated[float, BeforeValidator(_SHARE)]
"""A part of the whole. That it is below 1 is checked where it is used."""
_GAIN = number_parser("a gain", "write a number such as 0.2, or 0", zero=True)
Gain = Annotated[float, BeforeValidator(_GAIN)]
"""How strongly a controller answers to an error; 0: not at all."""
Text = Annotated[str, BeforeValidator(parse_text)]
Prefix = Annotated[str, BeforeValidator(parse_prefix)]
TokenName = Annotated[str, BeforeValidator(_token_name)]
QueryClient = Annotated[str, BeforeValidator(_query_client)]
Endpoint = Annotated[endpoints.HostPort, BeforeValidator(endpoints.parse_endpoint)]
Bind = Annotated[endpoints.HostPort, BeforeValidator(endpoints.parse_bind)]
AdvertisedHost = Annotated[str, BeforeValidator(endpoints.parse_host_pattern)]
MachineName = Annotated[str, BeforeValidator(endpoints.parse_machine)]
BrokerPorts = Annotated[endpoints.PortRange, BeforeValidator(endpoints.parse_broker_ports)]
Sni = Annotated[str, BeforeValidator(endpoints.parse_sni)]
FilePath = Annotated[Path, BeforeValidator(files.resolve)]
CertificateFile = Annotated[FilePath, AfterValidator(files.check_certificates)]
PasswordFile = Annotated[FilePath, AfterValidator(files.check_password)]
KeyFile = Annotated[FilePath, AfterValidator(files.check_private_key)]
TokenFile = Annotated[FilePath, AfterValidator(files.check_token)]


class Section(BaseModel):
    """A mapping of the YAML file: its keys are all known, its values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")
