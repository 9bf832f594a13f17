"""Listeners of a real Spark session, for the time of a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pyspark.sql import SparkSession

from proxy.spark import QuotaListener

DELIVERED_MS = 120_000

Listener = TypeVar("Listener", bound=QuotaListener)


def until_delivered(spark: SparkSession) -> None:
    """Wait until listeners have heard all that was until now.

    One that is added hears what Spark delivers from then on, also of queries that ended before; on
    a busy machine these events are many.
    """
    # pyspark has no public name for it.
    spark._jsparkSession.sparkContext().listenerBus().waitUntilEmpty(DELIVERED_MS)  # noqa: SLF001


@contextmanager
def attaching(spark: SparkSession) -> Iterator[Callable[[Listener], Listener]]:
    """Give what adds a listener to the session, for events from then on; all are taken away and
    closed at the end.
    """
    listeners: list[QuotaListener] = []

    def attach(listener: Listener) -> Listener:
        until_delivered(spark)
        listeners.append(listener)
        spark.streams.addListener(listener)
        return listener

    yield attach
    for listener in listeners:
        spark.streams.removeListener(listener)
        listener.close(0)
