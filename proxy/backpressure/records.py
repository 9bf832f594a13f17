"""What is kept in the state of each query whose rule is adaptive: one record."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
)

from proxy.progress.report import MAX_INT32, MAX_INT64, Partition, Topic, Uuid
from proxy.state import Json, Record, RecordFormat
from proxy.wire.topic_partition import TopicPartition

from .batch_cost import LEAST_NOISE, MOST_NOISE
from .told import KeptEnd

MAX_CHARS = 65_536
"""Of a client id, a user, a label; Kafka has no longer strings to speak of."""

MAX_NUMBER = 1e15
"""No rate, count or time in a record is larger."""

Text = Annotated[str, StringConstraints(max_length=MAX_CHARS)]
Offset = Annotated[int, Field(ge=0, le=MAX_INT64)]
Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER)]
Amount = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]


def _ratio(row: tuple[float, float, float]) -> tuple[float, float, float]:
    # What is counted is whole: nothing of it is 0, and a little of it at least 1.
    amount, records, _ = row
    if amount > 0 and (amount < 1 or records <= 0):
        raise ValueError(f"{amount:g} does not go with {records:g} records")
    return row


Ratio = Annotated[tuple[Amount, Amount, Amount], AfterValidator(_ratio)]


Cost = tuple[
    Amount,
    Amount,
    Amount,
    Amount,
    Annotated[float, Field(ge=-1, le=1)],
    Annotated[float, Field(ge=1, le=MAX_NUMBER)],
    Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)],
]


class Kept(BaseModel):
    """What a record says."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False)

    listener: Text
    user: Text | None
    client_id: Text
    entity: Text
    label: Text
    run_id: Uuid
    has_ended: bool = False
    """Whether that run is over: then only its figures are taken up."""
    interval_ms: Positive | None = None
    """Of the query's trigger, where it was learnt."""
    rate: Positive | None
    """Records per second."""
    last_rate: Positive | None = None
    """The same, of the latest run that had one."""
    instances: list[Annotated[int, Field(ge=0, le=MAX_INT32)]] = []
    """See Instances."""
    least_offsets: Offset = 0
    """See Clamp."""
    reach: Positive | None
    """See inputs.Reach; records per second."""
    waiting_ms: Amount
    estimator: tuple[Number, Positive, Number] | None
    """See pid.PidState; None with the other estimator."""
    cost: Cost | None = None
    """See batch_cost.CostState; older records have none."""
    bytes_per_record: Ratio
    """See RatioState; so is the next."""
    offsets_per_record: Ratio
    told: dict[Topic, dict[Partition, tuple[Offset, Offset, Offset]]]
    """See KeptEnd."""
    starts: dict[Topic, dict[Partition, Offset]]

    def ends(self) -> dict[TopicPartition, KeptEnd]:
        """Return what drivers were told of the ends of logs."""
        return {
            (topic, partition): KeptEnd(*end)
            for topic, rows in self.told.items()
            for partition, end in rows.items()
        }

    def log_starts(self) -> dict[TopicPartition, int]:
        """Return what drivers were told of the starts of logs."""
        return {
            (topic, partition): start
            for topic, rows in self.starts.items()
            for partition, start in rows.items()
        }


FORMAT = RecordFormat("pressure", 1, Kept)
"""Keys are `pressure/CLIENT_ID/ENTITY`."""


def by_topic(rows: Mapping[TopicPartition, Json]) -> dict[str, dict[str, Json]]:
    """Return what is known of partitions as JSON has it."""
    nested: dict[str, dict[str, Json]] = {}
    for (topic, partition), row in rows.items():
        nested.setdefault(topic, {})[str(partition)] = row
    return nested


def key_of(client_id: str, entity: str) -> str:
    """Return the key of a query's record."""
    return FORMAT.key(client_id, entity)


def read_record(record: Record) -> Kept:
    """Read a record. Raises ValueError with what is wrong with it."""
    kept = FORMAT.read(record)
    if record.key != key_of(kept.client_id, kept.entity):
        raise ValueError(f"it is about {kept.client_id!r}, {kept.entity!r}, which is not its key")
    return kept
