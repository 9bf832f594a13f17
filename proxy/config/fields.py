"""What the models are made of: a section, and values that are checked when they are read."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from proxy.config import endpoints, files, units
from proxy.config.problems import BadValueError, shown

DEFAULT: Final = "<default>"
"""As a rule's user or client-id: everyone for whom no rule of that level is written."""

MAX_FRAME_BYTES: Final = 2**31 - 1
"""The longest frame that Kafka's signed 32 bit length can announce."""

MAX_SAMPLES: Final = 1000
MAX_COUNT: Final = 2**31 - 1

MAX_NUMBER: Final = 10**12
"""The largest rate, gain or percentage: more is a slip, and far more overflows what is computed."""

MIN_INTERVAL_S: Final = 0.001
"""The shortest batch interval: Spark counts in milliseconds."""

_EXPONENT: Final = re.compile(r"[-+]?[0-9]+(\.[0-9]+)?[eE][-+]?[0-9]+", re.ASCII)
"""A number with an exponent. PyYAML takes most of them for text; Helm writes small numbers so."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadValueError(f"{shown(value)} is not text", "put it in quotes")
    if not value:
        raise BadValueError("is empty text", "write a name")
    return value


def _prefix(value: object) -> str:
    prefix = _text(value)
    if prefix == DEFAULT:
        raise BadValueError(f"{DEFAULT} is no prefix", f"write client-id: {DEFAULT}")
    return prefix


def _query_client(value: object) -> str:
    client_id = _text(value)
    if client_id == DEFAULT:
        raise BadValueError(
            f"{DEFAULT} stands for many clients, not for one query",
            "write the query's kafka.client.id",
        )
    return client_id


def _number(what: str, fix: str, *, zero: bool = False) -> Callable[[object], float]:
    """Make the check of a number above 0, or with `zero` from 0 on, up to `MAX_NUMBER`."""

    def parse(value: object) -> float:
        number = value
        if isinstance(value, str) and _EXPONENT.fullmatch(value):
            number = float(value)
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadValueError(f"{shown(value)} is not {what}", fix)
        if not 0 <= number < math.inf or not (number or zero):  # NaN fits no comparison
            raise BadValueError(
                f"{shown(value)} is not {what} {'of 0 or more' if zero else 'above 0'}", fix
            )
        if number > MAX_NUMBER:
            raise BadValueError(f"{shown(value)} is too large", f"write at most {MAX_NUMBER}")
        return float(number)

    return parse


def _batch_interval(value: object) -> units.Seconds:
    interval = units.parse_duration(value)
    if interval < MIN_INTERVAL_S:
        raise BadValueError(
            f"{shown(value)} is shorter than a millisecond",
            "write the trigger interval of the query, such as 2s",
        )
    return interval


def _frame_size(value: object) -> int:
    size_bytes = units.parse_size(value)
    if size_bytes > MAX_FRAME_BYTES:
        raise BadValueError(
            f"{shown(value)} is longer than a Kafka request can be", "write less than 2GiB"
        )
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


def one_of(*choices: str) -> Callable[[object], str]:
    """Make the check of a word that is one of the choices."""

    def parse(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise BadValueError(
                f"{shown(value)} is not known here", f"write {' or '.join(choices)}"
            )
        return value

    return parse


Size = Annotated[int, BeforeValidator(units.parse_size)]
"""Bytes, above 0."""
FrameSize = Annotated[int, BeforeValidator(_frame_size)]
Duration = Annotated[units.Seconds, BeforeValidator(units.parse_duration)]
"""Seconds, above 0."""
DurationOrZero = Annotated[units.Seconds, BeforeValidator(units.parse_duration_or_zero)]
BatchInterval = Annotated[units.Seconds, BeforeValidator(_batch_interval)]
"""Seconds, at least `MIN_INTERVAL_S`."""
Count = Annotated[int, BeforeValidator(_whole_number(1, MAX_COUNT))]
Samples = Annotated[int, BeforeValidator(_whole_number(2, MAX_SAMPLES))]
Percentage = Annotated[
    float,
    BeforeValidator(_number("a percentage", "write a number above 0 without a sign, such as 50")),
]
RecordRate = Annotated[
    float,
    BeforeValidator(_number("a rate", "write records per second without quotes, such as 1000")),
]
"""Records per second, above 0."""
RecordRateOrZero = Annotated[
    float,
    BeforeValidator(
        _number("a rate", "write records per second without quotes, such as 1000, or 0", zero=True)
    ),
]
Share = Annotated[
    float,
    BeforeValidator(_number("a share", "write a number from 0 to below 1, such as 0.5", zero=True)),
]
"""A part of the whole. That it is below 1 is checked where it is used."""
Gain = Annotated[
    float, BeforeValidator(_number("a gain", "write a number such as 0.2, or 0", zero=True))
]
"""How strongly a controller answers to an error; 0: not at all."""
Text = Annotated[str, BeforeValidator(_text)]
Prefix = Annotated[str, BeforeValidator(_prefix)]
QueryClient = Annotated[str, BeforeValidator(_query_client)]
Endpoint = Annotated[endpoints.HostPort, BeforeValidator(endpoints.parse_endpoint)]
Bind = Annotated[endpoints.HostPort, BeforeValidator(endpoints.parse_bind)]
AdvertisedHost = Annotated[str, BeforeValidator(endpoints.parse_advertised_host)]
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
