"""What settings are made of: values as people write them, checked and converted, and sections.

Sections are models, or, where another room needs them, its dataclasses: who makes one in a program
is free in its values, and from the file come only such as the types let pass, and that agree.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Final, NamedTuple, Self, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)
from pydantic import ValidatorFunctionWrapHandler as Read
from pydantic.fields import FieldInfo

from metrics.clock import MS_PER_SECOND
from metrics.stats import MIN_WINDOW_MS

from .entities import DEFAULT
from .validation import parse_client_id_prefix, parse_topic, parse_topic_prefix
from .values import (
    MAX_COUNT,
    BadValueError,
    number_parser,
    parse_duration,
    parse_duration_or_zero,
    parse_size,
    parse_text,
    shown,
)

Loc = tuple[str | int, ...]
"""Where a value stands in the document: keys and list positions from the top down."""

MAX_FRAME_BYTES: Final = 2**31 - 1
"""The longest frame that Kafka's signed 32 bit length can announce."""

MAX_WINDOW_SAMPLES: Final = 1000

MIN_INTERVAL_MS: Final = 1.0
"""The shortest batch interval: Spark counts in milliseconds."""

OTHER_PLACE: Final = "\0"
"""Stands in the message of a problem for the place of the other value."""

_Item = TypeVar("_Item")


class SectionProblem(NamedTuple):
    """What is wrong between values that are sound each by itself."""

    path: Loc
    """From the section that says so."""
    message: str
    fix: str
    other: Loc = ()
    """What a message with OTHER_PLACE is about as well."""


class SectionProblemsError(ValueError):
    """The values of a section contradict each other; the arguments are its problems."""


_UNIT: Final = re.compile("_m?s$")


def yaml_key(name: str) -> str:
    """Return the key in the file of a field: without its unit, and with Kafka's hyphens."""
    return _UNIT.sub("", name).replace("client_id", "client-id").replace("_prefix", "-prefix")


ONLY_KNOWN_KEYS: Final = ConfigDict(extra="forbid", alias_generator=yaml_key)


class SettingsBase:
    """A mapping of the file, as a frozen dataclass: its keys are all known, its values agree."""

    __slots__ = ()
    __pydantic_config__ = ONLY_KNOWN_KEYS

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if found := dict.fromkeys(self.find_section_problems()):
            raise SectionProblemsError(*found)
        return self

    def find_section_problems(self) -> Iterator[SectionProblem]:
        """Yield what is wrong between the values of this section, of which each is sound."""
        return iter(())


class ConfigSection(SettingsBase, BaseModel):
    """A section that is a model."""

    model_config = ConfigDict(frozen=True, **ONLY_KNOWN_KEYS)


def fields_of(section: Any) -> dict[str, FieldInfo] | None:
    """Return the fields of a class of sections by name; None: it is no section."""
    fields: dict[str, FieldInfo] | None = getattr(section, "__pydantic_fields__", None)
    is_dataclass = isinstance(section, type) and issubclass(section, SettingsBase)
    return _fields_of_dataclass(section) if fields is None and is_dataclass else fields


@cache
def _fields_of_dataclass(section: Any) -> dict[str, FieldInfo]:
    hints = get_type_hints(section, include_extras=True)
    return {name: FieldInfo.from_annotation(hints[name]) for name in section.__dataclass_fields__}


def keys_of_section(section: object) -> dict[str, FieldInfo]:
    """Return the fields of a class of sections by their keys in the file."""
    fields = fields_of(section) or {}
    return {field.alias or yaml_key(name): field for name, field in fields.items()}


def required_with_example(text: str) -> Any:
    """Return what a field is that the file must have, with an example of its line."""
    return Field(examples=[text])


def find_repeated(values: Iterable[tuple[Loc, _Item]]) -> Iterator[tuple[Loc, _Item, Loc]]:
    """Yield where a value stands again, the value, and where it stands first."""
    first: dict[_Item, Loc] = {}
    for loc, value in values:
        if first.setdefault(value, loc) != loc:
            yield loc, value, first[value]


def find_used_twice(
    at: Loc, items: Iterable[object], key: str, kind: str
) -> Iterator[SectionProblem]:
    """Yield which items of the list there have under a key what an earlier one has."""
    texts = (((*at, number), getattr(item, key)) for number, item in enumerate(items))
    for loc, text, earlier in find_repeated(each for each in texts if each[1] is not None):
        message = f"{shown(text)} is also the {key} of {OTHER_PLACE}"
        yield SectionProblem((*loc, key), message, f"give each {kind} a {key} of its own", earlier)


def find_unknown_names(
    named: Iterable[tuple[Loc, str | None]], known: Sequence[str], kind: str, add: str = ""
) -> Iterator[SectionProblem]:
    """Yield which names none of a kind has; `add`: how to mend that where there is none at all."""
    for loc, name in named:
        if name is not None and name not in known:
            nearest = difflib.get_close_matches(name, known, n=1) or known
            fix = f"write {' or '.join(nearest)}" if nearest else add
            yield SectionProblem(loc, f"no {kind} has the name {shown(name)}", fix)


def catch_bad_value(
    path: Loc, check: Callable[..., object], *values: object
) -> Iterator[SectionProblem]:
    """Yield what a check of values raises as BadValueError."""
    try:
        check(*values)
    except BadValueError as error:
        yield SectionProblem(path, error.message, error.fix)


def rejecting(is_bad: Callable[[Any], object], message: str, fix: str) -> WrapValidator:
    """Return a validator that refuses some of what is read; {} stands for what is written."""

    def check(value: object, read: Read) -> object:
        made = read(value)
        if is_bad(made):
            raise BadValueError(message.replace("{}", shown(value)), fix)
        return made

    return WrapValidator(check)


def not_empty(message: str, fix: str) -> WrapValidator:
    """Return a validator that refuses a list without items."""
    return rejecting(().__eq__, message, fix)


def whole_number_validator(low: int, high: int, word: str | None = None) -> BeforeValidator:
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
FrameSize = Annotated[Size, rejecting(MAX_FRAME_BYTES.__lt__, _TOO_LONG, "write less than 2GiB")]
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, above 0."""
DurationOrZero = Annotated[float, BeforeValidator(parse_duration_or_zero)]
"""Seconds."""
Milliseconds = Annotated[Duration, AfterValidator(MS_PER_SECOND.__mul__)]
"""Above 0."""
MillisecondsOrZero = Annotated[DurationOrZero, AfterValidator(MS_PER_SECOND.__mul__)]
Window = Annotated[Milliseconds, rejecting(MIN_WINDOW_MS.__gt__, _TOO_SHORT, "write 1ms or more")]
BatchInterval = Annotated[
    Milliseconds, rejecting(MIN_INTERVAL_MS.__gt__, _TOO_SHORT, _INTERVAL_FIX)
]
"""Milliseconds, at least `MIN_INTERVAL_MS`."""
Count = Annotated[int, whole_number_validator(1, MAX_COUNT)]
Samples = Annotated[int, whole_number_validator(2, MAX_WINDOW_SAMPLES)]
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
Prefix = Annotated[str, BeforeValidator(parse_client_id_prefix)]
Client = Annotated[Text, rejecting(DEFAULT.__eq__, _MANY_CLIENTS, "write the client id of one")]
QueryClient = Annotated[
    Text,
    rejecting(
        DEFAULT.__eq__, f"{_MANY_CLIENTS}, not for one query", "write the query's kafka.client.id"
    ),
]
Topic = Annotated[str, BeforeValidator(parse_topic)]
TopicPrefix = Annotated[str, BeforeValidator(parse_topic_prefix)]
