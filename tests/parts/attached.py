"""Listeners of a real Spark session, for the time of a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pyspark.sql import SparkSession

from proxy.spark import QuotaListener

DELIVERED_MS = 120_000

Listener = TypeVar("Listener", bound=QuotaListener)


@contextmanager
def attaching(spark: SparkSession) -> Iterator[Callable[[Listener], Listener]]:
    """Give what adds a listener to the session; all are taken away and closed at the end.

    A listener hears what Spark delivers from then on, also of queries that ended before: so these
    events are waited for first, of which a busy machine has many.
    """
    jvm_session = spark._jsparkSession  # noqa: SLF001 - pyspark has no public name for it
    listeners: list[QuotaListener] = []

    def attach(listener: Listener) -> Listener:
        jvm_session.sparkContext().listenerBus().waitUntilEmpty(DELIVERED_MS)
        listeners.append(listener)
        spark.streams.addListener(listener)
        return listener

    yield attach
    for listener in listeners:
        spark.streams.removeListener(listener)
        listener.close(0)
