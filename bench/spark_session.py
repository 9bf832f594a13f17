"""The Spark session of a benchmark's driver."""

from collections.abc import Mapping

from pyspark.sql import SparkSession

JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""As little work and memory as can be: the optimising compiler would take the cores from what is
measured, and a run is short."""


def spark_session(jars: str, master: str, settings: Mapping[str, str]) -> SparkSession:
    """Start a session on this machine alone.

    Args:
        jars: the Kafka connector's, by commas.
        master: such as `local[2]`.
        settings: further ones of Spark.

    """
    builder = SparkSession.builder.master(master).appName("quota-proxy bench")
    common = {
        "spark.jars": jars,
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    for name, value in {**common, **settings}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
