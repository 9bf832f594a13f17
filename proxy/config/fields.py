"""What the models are made of: values that are read as people write them, and a section."""

from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    WrapValidator,
    model_validator,
)
from pydantic import ValidatorFunctionWrapHandler as Read
from pydantic.fields import FieldInfo

from metrics.clock import MS_PER_SECOND
from metrics.stats import MIN_WINDOW_MS
from proxy.config import endpoints, files
from proxy.config.document import Loc
from proxy.progress.query_scope import ANY_REST
from proxy.quota.entities import DEFAULT
from proxy.quota.validation import parse_prefix, parse_topic, parse_topic_prefix
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

MAX_WORKERS: Final = 256
MAX_USAGE_INTERVAL_S: Final = 3600
MAX_SAMPLE_EVERY: Final = 1000

AUTO: Final = "auto"
"""Stands for a worker for each core that this process may use."""

MIN_INTERVAL_MS: Final = 1.0
"""The shortest batch interval: Spark counts in milliseconds."""

RESERVED_NAMES: Final = {
    "admin": "the token in admin.token_file",
    "local": "those who need no token",
    "file": "the configuration file",
}
"""How others than tokens by name are called, where changes are recorded."""

PATTERN_FIX: Final = "write names of queries, or how they begin, such as team-a-*"

OTHER_PLACE: Final = "\0"
"""Stands in the message of a conflict for the place of the other value."""

_Item = TypeVar("_Item")
_Agreeing = TypeVar("_Agreeing")


def format_duration(seconds: float) -> str:
    """Write a duration in its largest whole unit; `parse_duration_or_zero` reads it back."""
    exact = Decimal(repr(seconds))
    for name in ("h", "m", "s"):
        count = exact / DURATION_UNITS[name]
        if exact and count == count.to_integral_value():
            return f"{int(count)}{name}"
    return f"{(exact / DURATION_UNITS['ms']).normalize():f}ms"


def format_ms(duration_ms: float) -> str:
    """Write milliseconds as `format_duration`."""
    return format_duration(duration_ms / MS_PER_SECOND)


def format_number(number: float) -> str:
    """Write a finite number in digits alone: 1000000, not 1e6 or 1000000.0."""
    return f"{Decimal(repr(number)).normalize():f}"


class Conflict(NamedTuple):
    """What is wrong between values that are sound each by itself."""

    path: Loc
    """From the section that says so."""
    message: str
    fix: str
    other: Loc = ()
    """What a message with OTHER_PLACE is about as well."""


class ConflictError(ValueError):
    """The values of a section contradict each other; the arguments are its conflicts."""


def agree(section: _Agreeing) -> _Agreeing:
    """Return a section whose values agree. Raises ConflictError with all that do not."""
    found = dict.fromkeys(section.find_conflicts())  # type: ignore[attr-defined]
    if found:
        raise ConflictError(*found)
    return section


ONLY_KNOWN_KEYS: Final = ConfigDict(extra="forbid")
"""For sections that are settings of another room: dataclasses, in which each key has a `Field`, or
pydantic would check those without one last."""


class Section(BaseModel):
    """A mapping of the YAML file: its keys are all known, its values do not change, and agree."""

    model_config = ConfigDict(frozen=True, **ONLY_KNOWN_KEYS)
    _agree = model_validator(mode="after")(agree)

    def find_conflicts(self) -> Iterator[Conflict]:
        """Yield what is wrong between the values of this section, of which each is sound."""
        return iter(())


def fields_of(section: object) -> dict[str, FieldInfo] | None:
    """Return the fields of a section or of its class by name; None: it is no section."""
    fields: dict[str, FieldInfo] | None = getattr(section, "__pydantic_fields__", None)
    return fields


def keys_of_section(section: object) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in the file."""
    return {field.alias or name: field for name, field in (fields_of(section) or {}).items()}


def find_repeated(values: Iterable[tuple[Loc, _Item]]) -> Iterator[tuple[Loc, _Item, Loc]]:
    """Yield where a value stands again, the value, and where it stands first."""
    first: dict[_Item, Loc] = {}
    for loc, value in values:
        if first.setdefault(value, loc) != loc:
            yield loc, value, first[value]


def find_bad(path: Loc, check: Callable[..., object], *values: object) -> Iterator[Conflict]:
    """Yield what a check of values raises as BadValueError."""
    try:
        check(*values)
    except BadValueError as error:
        yield Conflict(path, error.message, error.fix)


def refuse(is_bad: Callable[[Any], object], message: str, fix: str) -> WrapValidator:
    """Return a validator that refuses some of what is read; {} stands for what is written."""

    def check(value: object, read: Read) -> object:
        made = read(value)
        if is_bad(made):
            raise BadValueError(message.replace("{}", shown(value)), fix)
        return made

    return WrapValidator(check)


def not_empty(message: str, fix: str) -> WrapValidator:
    """Return a validator that refuses a list without items."""
    return refuse(().__eq__, message, fix)


def _whole_number(low: int, high: int, word: str | None = None) -> BeforeValidator:
    """Return a validator of a whole number, or of a word that may stand for it."""
    fix = f"write a whole number from {low} to {high}" + (f", or {word}" if word else "")
    wrong = f"neither a whole number nor {word}" if word else "not a whole number"

    def parse(value: object) -> object:
        if value == word is not None:
            return value
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadValueError(f"{shown(value)} is {wrong}", fix)
        if not low <= value <= high:
            raise BadValueError(f"{shown(value)} is out of range", fix)
        return value

    return BeforeValidator(parse)


def _number(what: str, fix: str, *, zero: bool = False) -> BeforeValidator:
    return BeforeValidator(number_parser(what, fix, zero=zero))


def _checked_by(check: Callable[[Path], object]) -> AfterValidator:
    def checked(path: Path) -> Path:
        check(path)
        return path

    return AfterValidator(checked)


def _is_unprintable(text: str) -> bool:
    return not text.isprintable()


def _has_inner_rest(pattern: str) -> bool:
    return ANY_REST in pattern[:-1]


_OTHER_NAME = "choose another name"
_UNPRINTABLE = "{} is not printable"
_TOO_LONG = "{} is longer than a Kafka request can be"
_TOO_SHORT = "{} is shorter than a millisecond"
_INTERVAL_FIX = "write the trigger interval of the query, such as 2s"
_MANY_CLIENTS = f"{DEFAULT} stands for many clients"
_RATE_FIX = "write records per second without quotes, such as 1000"
_SHARE_FIX = "write a number from 0 to below 1, such as 0.5"
_WEIGHT_FIX = "write a number above 0, such as 3: twice the weight is twice the share"
_GAIN_FIX = "write a number such as 0.2, or 0"

Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, above 0."""
FrameSize = Annotated[Size, refuse(MAX_REQUEST_BYTES.__lt__, _TOO_LONG, "write less than 2GiB")]
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, above 0."""
DurationOrZero = Annotated[float, BeforeValidator(parse_duration_or_zero)]
"""Seconds."""
Milliseconds = Annotated[Duration, AfterValidator(MS_PER_SECOND.__mul__)]
"""Above 0."""
MillisecondsOrZero = Annotated[DurationOrZero, AfterValidator(MS_PER_SECOND.__mul__)]
Window = Annotated[Milliseconds, refuse(MIN_WINDOW_MS.__gt__, _TOO_SHORT, "write 1ms or more")]
UsageInterval = Annotated[
    Duration,
    refuse(
        lambda seconds: not 1 <= seconds <= MAX_USAGE_INTERVAL_S,
        "{} is out of range",
        "write 1s to 1h, such as 60s",
    ),
]
"""Seconds."""
SampleEvery = Annotated[int, _whole_number(1, MAX_SAMPLE_EVERY)]
BatchInterval = Annotated[Milliseconds, refuse(MIN_INTERVAL_MS.__gt__, _TOO_SHORT, _INTERVAL_FIX)]
"""Milliseconds, at least `MIN_INTERVAL_MS`."""
Count = Annotated[int, _whole_number(1, MAX_COUNT)]
Samples = Annotated[int, _whole_number(2, MAX_WINDOW_SAMPLES)]
Workers = Annotated[int | Literal["auto"], _whole_number(1, MAX_WORKERS, AUTO)]
RecordRate = Annotated[float, _number("a rate", _RATE_FIX)]
"""Records per second, above 0."""
RecordRateOrZero = Annotated[float, _number("a rate", f"{_RATE_FIX}, or 0", zero=True)]
Share = Annotated[float, _number("a share", _SHARE_FIX, zero=True)]
"""A part of the whole. That it is below 1 is checked where it is used."""
Weight = Annotated[float, _number("a weight", _WEIGHT_FIX)]
"""Above 0."""
Gain = Annotated[float, _number("a gain", _GAIN_FIX, zero=True)]
"""How strongly a controller answers to an error; 0: not at all."""
Text = Annotated[str, BeforeValidator(parse_text)]
Prefix = Annotated[str, BeforeValidator(parse_prefix)]
TokenName = Annotated[
    Text,
    *(
        refuse(name.__eq__, f"{{}} is the name of {whose}", _OTHER_NAME)
        for name, whose in RESERVED_NAMES.items()
    ),
    refuse(_is_unprintable, _UNPRINTABLE, _OTHER_NAME),
]
QueryPattern = Annotated[
    Text,
    refuse(_has_inner_rest, f"{{}} has a {ANY_REST} before its end", PATTERN_FIX),
    refuse(ANY_REST.__eq__, "{} is every query", "remove queries: then it is for all"),
    refuse(_is_unprintable, _UNPRINTABLE, PATTERN_FIX),
]
"""A query's name or client id, or a beginning of it and `*`."""
Client = Annotated[Text, refuse(DEFAULT.__eq__, _MANY_CLIENTS, "write the client id of one")]
QueryClient = Annotated[
    Text,
    refuse(
        DEFAULT.__eq__, f"{_MANY_CLIENTS}, not for one query", "write the query's kafka.client.id"
    ),
]
Topic = Annotated[str, BeforeValidator(parse_topic)]
TopicPrefix = Annotated[str, BeforeValidator(parse_topic_prefix)]
Endpoint = Annotated[endpoints.HostPort, BeforeValidator(endpoints.parse_endpoint)]
Bind = Annotated[endpoints.HostPort, BeforeValidator(endpoints.parse_bind)]
AdvertisedHost = Annotated[str, BeforeValidator(endpoints.parse_host_pattern)]
MachineName = Annotated[str, BeforeValidator(endpoints.parse_machine)]
BrokerPorts = Annotated[endpoints.PortRange, BeforeValidator(endpoints.parse_broker_ports)]
Sni = Annotated[str, BeforeValidator(endpoints.parse_sni)]
FilePath = Annotated[Path, BeforeValidator(files.resolve)]
CertificateFile = Annotated[FilePath, _checked_by(files.check_certificates)]
PasswordFile = Annotated[FilePath, _checked_by(files.read_password)]
HashKeyFile = Annotated[FilePath, _checked_by(files.read_hash_key)]
KeyFile = Annotated[FilePath, _checked_by(files.check_private_key)]
TokenFile = Annotated[FilePath, _checked_by(files.read_token)]
