"""Hands over what stages have written since their last reports: the batches are still under way.

A restart has to find that out from the logs, see Recovery. A handover knows it, and keeps it in
`ledger/PIPELINE/written/STAGE` until the next member has taken it up.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from proxy.state import Json, Record
from proxy.state.journal import RecordFormat

from .edges import TopicRange
from .running_pipeline import RunningPipeline, WrittenRange
from .wall_time import WallTime

_KIND = "written"


class _WrittenForm(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    stage: str
    ranges: tuple[tuple[TopicRange, Annotated[float, Field(allow_inf_nan=False)]], ...]
    """Each with the time at which it was written, in seconds of the wall clock."""


_FORMAT = RecordFormat("ledger", 1, _WrittenForm)


def is_written_record(record: Record, pipeline: str) -> bool:
    """Return whether a record says what a stage of a pipeline has written."""
    return record.key.startswith(f"{_FORMAT.key(pipeline, _KIND)}/")


def written_records(pipeline: RunningPipeline, wall: WallTime) -> list[Record]:
    """Return the records of what the stages have written and not reported."""
    records: list[Record] = []
    for stage, outputs in pipeline.outputs.items():
        if outputs:
            ranges = [
                (asdict(each.range), wall.to_s(each.at_ms))
                for each in outputs
                if each.range.start < each.range.end
            ]
            value: Json = {"stage": stage, "ranges": ranges}
            records.append(_FORMAT.record((pipeline.name, _KIND, stage), value))
    return records


def resume_written(
    pipeline: RunningPipeline, records: Iterable[Record], wall: WallTime
) -> list[str]:
    """Resume what these records say; return which were refused, and why."""
    refused: list[str] = []
    for record in records:
        try:
            form = _FORMAT.read(record)
        except ValueError as error:
            refused.append(f"{record.key}: {error}; deleted")
            continue
        stage = pipeline.stages.get(form.stage)
        if stage is not None:
            pipeline.outputs[stage.name] = [
                WrittenRange(each, wall.to_ms(at_s))
                for each, at_s in form.ranges
                if each.topic in stage.produces
            ]
    return refused
