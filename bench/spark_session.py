"""The Spark session of a benchmark's driver."""

from collections.abc import Mapping

from pyspark.sql import SparkSession

JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""As little work and memory as can be: the optimising compiler would take the cores from what is
measured, and a run is short."""


def spark_session(jars: str, master: str, settings: Mapping[str, str]) -> SparkSession:
    """Start a session on this machine alone; `jars` are the Kafka connector's, by commas."""
    builder = SparkSession.builder.master(master).appName("quota-proxy bench")
    builder = builder.config("spark.jars", jars).config("spark.ui.enabled", "false")
    for name in ("spark.driver.host", "spark.driver.bindAddress"):
        builder = builder.config(name, "127.0.0.1")
    builder = builder.config("spark.driver.extraJavaOptions", JAVA_OPTIONS)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()
