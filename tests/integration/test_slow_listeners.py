"""What is known of a query when other listeners of its driver are slow and events come late."""

from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import pytest
from parts.attached import until_delivered
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener
from support.groups import offsets_of
from support.proxy_process import ProxyProcess
from support.streams import Stream, partition_of

from examples.devkit.broker import EmbeddedBroker
from proxy.spark import QuotaListener

pytestmark = pytest.mark.slow

GROUP = "slow-orders"
SLOW_LISTENERS = 9
SLOW_S = 2.0
PARTITIONS = (0, 1)
EACH = 2000
"""Records in each partition."""
BATCH_ROWS = 500
BATCHES = EACH * len(PARTITIONS) // BATCH_ROWS


class SlowListener(StreamingQueryListener):
    """Takes its time for each event but the start, which the query itself waits for.

    With the event of the last batch it keeps Spark's listener bus until it is told to let go.
    """

    def __init__(self, may_go_on: Event) -> None:
        self.may_go_on = may_go_on

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802
        pass

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802
        self.may_go_on.wait(None if event.progress.batchId >= BATCHES - 1 else SLOW_S)

    def onQueryIdle(self, event: Any) -> None:  # noqa: ARG002, N802
        self.may_go_on.wait(SLOW_S)

    onQueryTerminated = onQueryIdle  # noqa: N815


@pytest.fixture
def slow_listeners(spark: SparkSession) -> Iterator[None]:
    may_go_on = Event()
    listeners = [SlowListener(may_go_on) for _ in range(SLOW_LISTENERS)]
    until_delivered(spark)  # else they wait at batches of tests before, too
    for listener in listeners:
        spark.streams.addListener(listener)
    yield
    may_go_on.set()
    for listener in listeners:
        spark.streams.removeListener(listener)


def test_lag_and_group_are_right_before_the_event_on_the_last_batch(
    *,
    kafka: EmbeddedBroker,
    proxy: Callable[..., ProxyProcess],
    slow_listeners: None,
    listen: Callable[[ProxyProcess], QuotaListener],
    stream: Callable[..., Stream],
    topic: Callable[..., str],
) -> None:
    assert slow_listeners is None  # they are ahead of ours
    running = proxy(queries=[{"name": "orders", "commit_group": GROUP}])
    listen(running)
    query = stream(running, "orders", topic(len(PARTITIONS)))
    query.feed(EACH, 100, PARTITIONS)
    query.start("200 milliseconds", {"maxOffsetsPerTrigger": str(BATCH_ROWS)})
    query.until_read(dict.fromkeys(PARTITIONS, EACH))

    def lag() -> list[int]:
        document = query.known()
        return [partition_of(document, query.topic, each)["lag_records"] for each in PARTITIONS]

    query.until(lambda: lag() == [0, 0], "no lag is shown")
    ends = {(query.topic, each): EACH for each in PARTITIONS}
    query.until(lambda: offsets_of(kafka.bootstrap, GROUP) == ends, "the group is at the end")
    document = query.known()
    assert document["run_batches"] == len(query.batches) == BATCHES
    assert (document["report_age_s"] is not None, document["advice"]) == (True, [])
    assert running.metrics().labels("spark_report_age_seconds", "query") == {"orders"}
