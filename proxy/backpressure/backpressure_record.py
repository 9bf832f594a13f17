"""What is kept in the state of each query whose rule is adaptive: one record."""

from collections.abc import Mapping
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from proxy.progress.progress_records import Int32
from proxy.progress.report import Figure, Partition, Topic, Uuid
from proxy.state import Json, Record, RecordFormat
from proxy.wire.topic_partition import TopicPartition

from .cost import Amount, CostState, PidState, Positive

MAX_CHARS = 65_536
"""Of any text; Kafka has no longer strings to speak of."""

Row = TypeVar("Row")
LongText = Annotated[str, StringConstraints(max_length=MAX_CHARS)]


def _checked(row: tuple[float, float, float]) -> tuple[float, float, float]:
    # What is counted is whole: nothing of it is 0, and a little of it at least 1.
    amount, records, _ = row
    if amount > 0 and (amount < 1 or records <= 0):
        raise ValueError(f"{amount:g} does not go with {records:g} records")
    return row


RatioState = Annotated[tuple[Amount, Amount, Amount], AfterValidator(_checked)]
"""Amount, records, and records since then without any of it."""


class BackpressureRecord(BaseModel):
    """What a record says."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    listener: LongText
    user: LongText | None
    client_id: LongText
    entity: LongText
    label: LongText
    run_id: Uuid
    has_ended: bool = False
    """Whether that run is over: then only what was measured of it is resumed."""
    interval_ms: Positive | None = None
    """Of the query's trigger, where it was learnt."""
    rate: Positive | None
    """Records per second."""
    last_rate: Positive | None = None
    """The same, of the latest run that had one."""
    instances: list[Int32] = []
    """Numbers of requests, see QueryDrivers."""
    least_offsets: Figure = 0
    """See QueryDrivers."""
    reach: Positive | None
    """See ThrottledRate; records per second."""
    waiting_ms: Amount
    """See measurements.queued_ms."""
    estimator: PidState | None
    """None with the other estimator."""
    cost: CostState | None = None
    """The same; older records have none."""
    bytes_per_record: RatioState
    offsets_per_record: RatioState
    told: dict[Topic, dict[Partition, tuple[Figure, Figure, Figure]]]
    """What was advertised: offset, log end and idle offset."""
    starts: dict[Topic, dict[Partition, Figure]]
    """The log starts that drivers were given."""


BOUND_RECORDS = RecordFormat("pressure", 1, BackpressureRecord)
"""Keys are `pressure/CLIENT_ID/ENTITY`."""


def by_partition(nested: Mapping[str, Mapping[str, Row]]) -> dict[TopicPartition, Row]:
    """Return by topic and partition what JSON has nested."""
    return {
        (topic, int(partition)): row
        for topic, rows in nested.items()
        for partition, row in rows.items()
    }


def by_topic(rows: Mapping[TopicPartition, Json]) -> dict[str, dict[str, Json]]:
    """Return what is known of partitions as JSON has it."""
    nested: dict[str, dict[str, Json]] = {}
    for (topic, partition), row in rows.items():
        nested.setdefault(topic, {})[str(partition)] = row
    return nested


def read_backpressure_record(record: Record) -> BackpressureRecord:
    """Read a record. Raises ValueError with what is wrong with it."""
    read = BOUND_RECORDS.read(record)
    if record.key != BOUND_RECORDS.key(read.client_id, read.entity):
        raise ValueError(f"it is about {read.client_id!r}, {read.entity!r}, which is not its key")
    return read
