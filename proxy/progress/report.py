"""What a listener in the driver reports, checked field by field before anybody sees it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self
from uuid import UUID

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from metrics.clock import MS_PER_SECOND
from proxy.wire.topic_partition import TopicPartition

from .offset_ranges import OffsetRanges

MAX_REPORT_BYTES = 4 << 20
"""Room for MAX_PARTITIONS with names as long as Kafka lets them be."""

MAX_PARTITIONS = 10_000
"""In one report, all sources together."""

MAX_VALUES = 100_000
"""In a report: MAX_PARTITIONS with all that is said of each come to 60,000."""

MAX_SOURCES = 1000
MAX_NAME_CHARS = 256
MAX_DESCRIPTION_CHARS = 65_536
MAX_ERROR_CHARS = 65_536
MAX_DURATIONS = 100

MAX_INT64 = 2**63 - 1
MAX_INT32 = 2**31 - 1

MAX_AGE_MS = 7 * 86_400_000.0
"""The oldest event that is reported: a week."""

MAX_UUIDS = 10_000
"""Kept as they are read: each report has three that were in those before."""

MAX_CHARS_SHOWN = 60
"""Of a key or value that is wrong, in an error."""

MAX_REFUSED_RANGES = 16

ANY_REST = "*"
"""At the end of a pattern: names may go on in any way."""


class RefusalReason(StrEnum):
    """Why a report is refused, and the HTTP status of that."""

    status: int

    def __new__(cls, value: str, status: int) -> Self:
        """Make a member of its text and status."""
        made = str.__new__(cls, value)
        made._value_, made.status = value, status
        return made

    MALFORMED = "malformed", 400
    NO_CLIENT = "no_client", 400
    UNKNOWN_QUERY = "unknown_query", 404
    CLIENT_TAKEN = "client_taken", 409
    REPEATED = "repeated", 409
    OUT_OF_ORDER = "out_of_order", 409
    IMPOSSIBLE = "impossible", 422
    OWNED_ELSEWHERE = "owned_elsewhere", 503  # listeners send it again
    NOT_ALLOWED = "not_allowed", 403


IN_ORDER = "send each report once, in the order of the events"
OWN_ID = "give each query a client id of its own: kafka.client.id, or client_options(name)"
THIS_PROXY = "let the query read through this proxy, and report what it read"
_OTHER_TOKEN = "use the token for that query, or add it to this one's queries in admin.tokens"
"""What mends what is refused."""


class ReportRefused(Exception):  # noqa: N818 - named for what happened
    """A report that changes nothing: the reason, what is wrong, and how to mend it."""

    def __init__(self, reason: RefusalReason, message: str, fix: str = IN_ORDER) -> None:
        super().__init__(message)
        self.reason, self.message, self.fix = reason, message, fix
        self.status = reason.status


@dataclass(frozen=True, slots=True)
class ReportableQueries:
    """The queries with names and client ids that a pattern matches; without patterns all."""

    patterns: tuple[str, ...] | None = None
    """Names, and beginnings of names with ANY_REST behind them; case counts."""

    def covers(self, name: str) -> bool:
        """Return whether a name or client id is one that may be reported on."""
        return self.patterns is None or any(
            name.startswith(each.removesuffix(ANY_REST))
            if each.endswith(ANY_REST)
            else name == each
            for each in self.patterns
        )

    def check(self, names: Mapping[str, str | None]) -> None:
        """Raise ReportRefused unless all names of a query are covered, by what each of them is."""
        for what, name in names.items():
            if name is not None and not self.covers(name):
                text = f"this token may not report on the query with the {what} {name!r}"
                raise ReportRefused(RefusalReason.NOT_ALLOWED, text, _OTHER_TOKEN)


ALL_QUERIES = ReportableQueries()


@dataclass(slots=True)
class ReportSequence:
    """One listener, by the numbers of its reports; it may start at any number."""

    last: int
    """The highest one that was accepted."""
    refused: OffsetRanges = field(default_factory=lambda: OffsetRanges(MAX_REFUSED_RANGES))
    """Higher ones that came and were refused: not lost."""

    def accept(self, number: int, *, counts_lost: bool) -> int:
        """Record a number that is accepted; return how many were lost before it, if that counts."""
        lost, next_number = 0, self.last + 1
        if counts_lost and number > next_number:
            lost = number - next_number - self.refused.covered(next_number, number)
        if self.refused.starts:
            self.refused.remove_below(number + 1)
        self.last = number
        return lost


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


@lru_cache(MAX_UUIDS)
def _uuid(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        raise ValueError("is not a UUID") from None


def _whole(number: float) -> float:
    if number % 1:
        raise ValueError("is no whole number")
    return number


def _timestamp_ms(value: object) -> float:
    # Pydantic would take seconds as a number, or as the digits of one.
    time = datetime.fromisoformat(value) if isinstance(value, str) else None
    if time is None or time.tzinfo is None:
        raise ValueError("is not a time such as 2026-01-02T03:04:05.678Z")
    return time.timestamp() * MS_PER_SECOND


Uuid = Annotated[str, StringConstraints(max_length=36), AfterValidator(_uuid)]
"""In its usual spelling, whichever it came in."""

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_NAME_CHARS), AfterValidator(_printable)
]
Topic = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
Partition = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,8})$")]
"""Its number in its only spelling: any other would name one partition twice."""

Figure = Annotated[int, Field(ge=0, le=MAX_INT64)]
WholeMilliseconds = Annotated[float, Field(ge=0, le=float(MAX_INT64)), AfterValidator(_whole)]
"""As Spark counts them: a part of one would be next to nothing to divide by."""

Offsets = Annotated[
    dict[Topic, Annotated[dict[Partition, Figure], Field(fail_fast=True)]], Field(fail_fast=True)
]
"""The first mistake ends the reading: one for each of many partitions would take a second."""


class _Part(BaseModel):
    # Keys that are not known are left out: a listener may be newer than the proxy.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)


class SourceProgress(_Part):
    """What a batch read of one Kafka source."""

    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)]
    start: Offsets | None
    """None for the first batch of a query."""
    end: Offsets
    latest: Offsets | None
    """What the driver took for the log ends; nothing here relies on it."""
    rows: Figure


@dataclass(frozen=True, slots=True)
class BatchRange:
    """What a batch completed of a partition."""

    start: int | None
    """None when the batch says nothing of it: the first one of a query, or a new partition."""
    end: int
    """The offset behind the last one."""
    rowless: int | None = field(default=None, compare=False)
    """At most so many offsets of the batch gave it no row, in all partitions of its source; None
    when that is not known."""

    def of_both(self, other: "BatchRange") -> "BatchRange":
        """Return what two sources that read the partition have both completed."""
        start = None if self.start is None or other.start is None else min(self.start, other.start)
        rowless = max(self.rowless or 0, other.rowless or 0)
        return BatchRange(start, min(self.end, other.end), rowless)


class BatchReport(_Part):
    """One micro-batch that is done."""

    batch_id: Figure
    timestamp_ms: Annotated[
        float, Field(validation_alias="timestamp"), BeforeValidator(_timestamp_ms)
    ]
    """When the trigger began, in milliseconds of the Unix epoch, on the driver's clock."""
    rows: Figure
    durations_ms: Annotated[dict[str, Figure], Field(max_length=MAX_DURATIONS)]
    """Spark's durationMs: `triggerExecution` and others."""
    sources: Annotated[tuple[SourceProgress, ...], Field(max_length=MAX_SOURCES, strict=False)]

    execution_ms: ClassVar[int | None]
    """How long the whole batch took, from its trigger on; None when it does not say."""
    ranges: ClassVar[Mapping[TopicPartition, BatchRange]]
    """What the batch completed of each partition.

    Where several sources read one, the lowest start (None when one has none) and the lowest end
    count: so the ranges of batches in a row join, whichever source is ahead.
    """
    offsets: ClassVar[int | None]
    """By how many offsets the batch went on, in each partition once; None when it is not said where
    it began in each: a first one, or a new partition."""

    @model_validator(mode="after")
    def _derive(self) -> Self:
        """Set what follows of the fields, once: a long report is parsed in a thread."""
        ranges: dict[TopicPartition, BatchRange] = {}
        for source in self.sources:
            starts = source.start or {}
            of_source = [
                ((topic, int(partition)), starts.get(topic, {}).get(partition), end)
                for topic, ends in source.end.items()
                for partition, end in ends.items()
            ]
            # Too few where Spark counts rows twice, and where the batch says no start.
            offsets = sum([end - start for _, start, end in of_source if start is not None])
            rowless = max(offsets - source.rows, 0)
            for key, start, end in of_source:
                read = BatchRange(start, end, rowless)
                ranges[key] = read.of_both(ranges[key]) if key in ranges else read
        known = [read.end - read.start for read in ranges.values() if read.start is not None]
        whole = sum(known) if len(known) == len(ranges) else None
        execution_ms = self.durations_ms.get("triggerExecution")
        vars(self).update(ranges=ranges, offsets=whole, execution_ms=execution_ms)
        return self


class TriggerKind(StrEnum):
    """What makes a run plan its batches; `AVAILABLE_NOW` and `ONCE` take the log ends once.

    Under `CONTINUOUS` and `REAL_TIME` batches are not planned, but are what was read in a time.
    """

    PROCESSING_TIME = "processing_time"
    AVAILABLE_NOW = "available_now"
    ONCE = "once"
    CONTINUOUS = "continuous"
    REAL_TIME = "real_time"
    OTHER = "other"
    """Any that is not known here: a listener may be newer than the proxy."""

    @classmethod
    def _missing_(cls, value: object) -> "TriggerKind | None":
        return cls.OTHER if isinstance(value, str) else None


class ReportedTrigger(_Part):
    """When a run plans its batches."""

    kind: Annotated[TriggerKind, Field(strict=False)]
    interval_ms: WholeMilliseconds | None = None
    """Between the starts of two batches, or between two checkpoints; 0: as fast as it can."""


class Report(_Part):
    """One event of a query, or a sign that its run lives; `parse_report` makes it."""

    sender: Uuid
    number: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    """Counts the sender's events; None with `running`, which is no event of Spark."""
    event: Literal["started", "progress", "idle", "terminated", "running"]
    query_id: Uuid
    """Of the checkpoint."""
    run_id: Uuid
    name: Name | None = None
    client_id: Name | None = None
    """None: the name."""
    age_ms: Annotated[float, Field(ge=0, le=MAX_AGE_MS)]
    """How long ago the driver saw the event."""
    batch: BatchReport | None = None
    """With `progress` and never else."""
    error: Annotated[str, Field(max_length=MAX_ERROR_CHARS)] | None = None
    """With `terminated`, when the query failed."""
    last_batch_id: Annotated[int, Field(ge=0, le=MAX_INT64)] | None = None
    """With `running`: of the last batch of the run that is done."""
    is_waiting: bool | None = None
    """With `running`: whether the run waited for its next trigger or for data when it was looked
    at, after the sender's report before this one was answered; None when that is not known."""
    known_age_ms: Annotated[float, Field(ge=0)] | None = None
    """With `running`: how long ago Spark was asked what it answered last: which batches are done.
    None where it can't be asked."""
    trigger: ReportedTrigger | None = None
    """With `started` and `running`, where Spark's own objects can be asked."""

    ranges: ClassVar[Mapping[TopicPartition, BatchRange]]
    """What its batch completed of each partition, if it has one."""

    @model_validator(mode="after")
    def _check_event(self) -> Self:
        if (self.event == "running") != (self.number is None):
            raise ValueError("each event but running has a number")
        if (self.event == "progress") != (self.batch is not None):
            raise ValueError("a batch comes with the event progress and with no other")
        if self.error is not None and self.event != "terminated":
            raise ValueError("an error comes with the event terminated and with no other")
        vars(self).update(ranges={} if self.batch is None else self.batch.ranges)
        sources = self.batch.sources if self.batch is not None else ()
        if sum(map(_partitions_named, sources)) > MAX_PARTITIONS:
            raise ValueError(f"the batch has more than {MAX_PARTITIONS} partitions")
        return self


def count_values(raw: bytes) -> int:
    """Return how many values JSON has, or more; it is not parsed for that."""
    return raw.count(b",")


def parse_report(raw: bytes) -> Report:
    """Parse a report. A long one has two steps in which no other thread goes on, some 10 ms each.

    Whether it agrees with others and the log is checked by QueryRegistry. Nothing is converted: a
    number that is written as text or as `true`, NaN and what does not fit 64 bits are refused, keys
    that are not known are left out.

    Raises ReportRefused: malformed when it is none, impossible for negative rows, offsets or times.
    """
    try:
        if len(raw) > MAX_REPORT_BYTES:
            raise ValueError(f"a report of {len(raw)} bytes; the most is {MAX_REPORT_BYTES}")
        if (values := count_values(raw)) > MAX_VALUES:
            raise ValueError(f"a report of {values} values; the most is {MAX_VALUES}")
        return Report.model_validate(_json_of(raw))
    except ValidationError as error:
        mistakes = error.errors(include_url=False, include_context=False)
        if all(map(_is_negative_figure, mistakes)):
            where = ".".join(map(str, mistakes[0]["loc"][1:]))
            text = f"{where} is {mistakes[0]['input']}"
            fix = "report figures of 0 or more"
            raise ReportRefused(RefusalReason.IMPOSSIBLE, text, fix) from None
        text = _in_words(mistakes[0])
    except ValueError as error:
        text = str(error)
    fix = "send one report of proxy.spark.QuotaListener, in JSON"
    raise ReportRefused(RefusalReason.MALFORMED, text, fix)


def _json_of(raw: bytes) -> Any:
    try:
        return from_json(raw)
    except ValueError as error:
        raise ValueError(f"Invalid JSON: {error}") from None


_NO_KEY = "is not the name of a topic, or not the number of a partition"


def _partitions_named(source: SourceProgress) -> int:
    every = (source.end, source.start or {}, source.latest or {})
    return max([sum(map(len, offsets.values())) for offsets in every])


def _is_negative_figure(mistake: ErrorDetails) -> bool:
    """Return whether it is one of a batch, and fits 64 bits."""
    is_below = mistake["type"] == "greater_than_equal" and mistake["loc"][0] == "batch"
    return is_below and mistake["input"] >= -MAX_INT64 - 1


def _in_words(mistake: ErrorDetails) -> str:
    """Return what is wrong and where, with little of it quoted."""
    is_key = mistake["type"] == "string_pattern_mismatch"
    message = _NO_KEY if is_key else mistake["msg"].removeprefix("Value error, ")
    if not mistake["loc"]:
        return message
    # Keys are the sender's: no control characters in a log.
    where = ".".join(ascii(str(part)[:MAX_CHARS_SHOWN])[1:-1] for part in mistake["loc"])
    pieces = json.JSONEncoder(default=str).iterencode(mistake["input"])  # it may be the whole
    given = "".join(islice(pieces, MAX_CHARS_SHOWN + 1))
    if len(given) > MAX_CHARS_SHOWN:
        given = f"{given[:MAX_CHARS_SHOWN]}..."
    return f"{where}: {message}, given {given}"
