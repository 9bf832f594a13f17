"""Listeners of a real Spark session, for the time of a test."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pyspark.sql import SparkSession

from proxy.spark import QuotaListener

Listener = TypeVar("Listener", bound=QuotaListener)


@contextmanager
def attaching(spark: SparkSession) -> Iterator[Callable[[Listener], Listener]]:
    """Give what adds a listener to the session; all are taken away and closed at the end."""
    listeners: list[QuotaListener] = []

    def attach(listener: Listener) -> Listener:
        listeners.append(listener)
        spark.streams.addListener(listener)
        return listener

    yield attach
    for listener in listeners:
        spark.streams.removeListener(listener)
        listener.close(0)
