"""`quota-proxy usage`: who used what, by a Spark on this machine and the proxy's configuration."""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from datetime import time as day_time
from pathlib import Path

import pyspark
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pyspark.sql import SparkSession

from metrics.clock import MS_PER_SECOND
from proxy.config import Config, ConfigError, load_config
from proxy.config.files import read_password
from proxy.spark.usage.command_line import KeyValues, UsageInputError, cause_of, run_program
from proxy.spark.usage.record_frames import store_records
from proxy.spark.usage.teams import read_teams
from proxy.spark.usage.usage_report import (
    PAGE_FILE,
    add_report_options,
    date_range_of,
    prepare_out,
    summary_of,
    write_report,
)
from proxy.spark.usage.usage_stream import USAGE_NAME, usage_query

LOCAL_SETTINGS = {
    "spark.master": "local[*]",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    # Each of some 20 queries has as many tasks, however little there is.
    "spark.sql.shuffle.partitions": str(max(8, 2 * (os.cpu_count() or 1))),
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
BATCH_OPTIONS = {
    "fetchOffset.numRetries": "1",
    "kafka.default.api.timeout.ms": "20000",
    "kafka.request.timeout.ms": "15000",
}
"""So that a cluster which does not answer is told of within a minute."""
_IS_CAUSE = re.compile("Exception in thread|.*(No such file|not set)")
SLACK = timedelta(days=1)
"""How much before the first day the topic is read from: a member's clock may be behind."""


def run_usage(what: str, words: Sequence[str]) -> int:
    """Run `report` or `stream` with these arguments; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"quota-proxy usage {what}")
    config_help = "the YAML file that the proxy runs with"
    parser.add_argument("-c", "--config", type=Path, required=True, help=config_help)
    if what == "report":
        add_report_options(parser)
        parquet_help = "what `usage stream` has stored (default: read the topic)"
        parser.add_argument("--parquet", metavar="DIR", help=parquet_help)
    else:
        parser.add_argument("--out", required=True, metavar="DIR", help="folder for Parquet files")
        parser.add_argument("--once", action="store_true", help="copy what is there now, and end")
    set_help = "of Spark, such as spark.jars=FILE,... in place of its connector's package"
    parser.add_argument("--set", action=KeyValues, default={}, metavar="KEY=VALUE", help=set_help)
    return run_program(_report if what == "report" else _stream, parser, words)


def _report(given: argparse.Namespace) -> None:
    config, span = _config(given.config), date_range_of(given)
    prepare_out(given.out)
    with _session(given.set, needs_kafka=given.parquet is None) as spark:
        teams = None if given.teams is None else read_teams(spark, given.teams)
        with tempfile.TemporaryDirectory(prefix="quota-proxy-usage-") as copied:
            folder = given.parquet or copied
            if given.parquet is None:
                copy_usage_topic(spark, config, span.first, copied)
            try:
                figures, notes = write_report(spark, folder, span, given.out, teams, _rules(config))
            except UsageInputError as error:
                text = str(error).replace(copied, f"topic {_topic(config)!r}")
                raise UsageInputError(text) from None
    lines = [*summary_of(figures, notes), str(given.out / PAGE_FILE)]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def copy_usage_topic(spark: SparkSession, config: Config, first: date, folder: str) -> None:
    """Store what the topic has since the first day."""
    begin = datetime.combine(first, day_time(), UTC) - SLACK
    topic = _topic(config)
    options = {
        **_source(config),
        **BATCH_OPTIONS,
        "subscribe": topic,
        "startingTimestamp": str(int(begin.timestamp() * MS_PER_SECOND)),
        "startingOffsetsByTimestampStrategy": "latest",
    }
    try:
        store_records(spark.read.format("kafka").options(**options).load(), folder)
    except Exception as error:
        servers = options["kafka.bootstrap.servers"]
        text = f"can't read topic {topic!r} at {servers}: {cause_of(error)}"
        fix = "see that a proxy with `usage` has run there, and cluster.tls and cluster.sasl"
        raise RuntimeError(f"{text}; fix: {fix}") from None


def _stream(given: argparse.Namespace) -> None:
    config = _config(given.config)
    trigger = {"availableNow": True} if given.once else None
    with _session(given.set, needs_kafka=True) as spark:
        options = _source(config)
        usage_query(spark, options, given.out, _topic(config), trigger).awaitTermination()


def _topic(config: Config) -> str:
    return USAGE_NAME if config.usage is None else config.usage.topic


def _rules(config: Config) -> list[str]:
    """Return the rules as records name them; none where these are hashed."""
    if config.usage is not None and config.usage.hash_key_file is not None:
        return []
    return [rule.shared_entity for rule in config.quota_settings.rules]


def _config(path: Path) -> Config:
    try:
        return load_config(path)
    except ConfigError as error:
        raise UsageInputError(str(error)) from None


def _source(config: Config) -> dict[str, str]:
    """Return the options of Spark's Kafka source for the cluster that the proxy is in front of.

    Kafka's client takes a key as PKCS #8 only, and certificates with it as text.
    """
    cluster = config.cluster
    options = {
        "kafka.bootstrap.servers": ",".join(map(str, cluster.bootstrap_servers)),
        "kafka.client.id": USAGE_NAME,
    }
    if cluster.tls is not None:
        options["kafka.security.protocol"] = "SSL"
        if cluster.tls.ca_file is not None:
            options["kafka.ssl.truststore.type"] = "PEM"
            options["kafka.ssl.truststore.location"] = str(cluster.tls.ca_file)
        if cluster.tls.cert_file is not None and cluster.tls.key_file is not None:
            key = load_pem_private_key(cluster.tls.key_file.read_bytes(), None)
            form = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            options["kafka.ssl.keystore.type"] = "PEM"
            options["kafka.ssl.keystore.key"] = key.private_bytes(*form).decode()
            options["kafka.ssl.keystore.certificate.chain"] = cluster.tls.cert_file.read_text()
    if cluster.sasl is not None:
        kind = "plain.Plain" if cluster.sasl.mechanism == "PLAIN" else "scram.Scram"
        login = {
            "username": cluster.sasl.username,
            "password": read_password(cluster.sasl.password_file),
        }
        words = " ".join(f'{name}="{_escaped(value)}"' for name, value in login.items())
        options |= {
            "kafka.security.protocol": "SASL_PLAINTEXT" if cluster.tls is None else "SASL_SSL",
            "kafka.sasl.mechanism": cluster.sasl.mechanism,
            "kafka.sasl.jaas.config": f"org.apache.kafka.common.security.{kind}LoginModule "
            f"required {words};",
        }
    return options


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


@contextmanager
def _session(settings: dict[str, str], *, needs_kafka: bool) -> Iterator[SparkSession]:
    """Give a Spark of this process's own. What its Java says goes to a file, kept if it fails."""
    scala = "2.12" if pyspark.__version__.startswith("3.") else "2.13"
    connector = f"org.apache.spark:spark-sql-kafka-0-10_{scala}:{pyspark.__version__}"
    package = {"spark.jars.packages": connector} if needs_kafka else {}
    given = {**LOCAL_SETTINGS, **({} if "spark.jars" in settings else package), **settings}
    descriptor, log = tempfile.mkstemp(prefix="quota-proxy-usage-", suffix=".log")
    own_errors = os.dup(2)
    try:
        os.dup2(descriptor, 2)  # Java inherits it
        try:
            spark = SparkSession.builder.config(map=given).getOrCreate()
        except Exception:  # says no more than that it has not started
            lines = Path(log).read_text(errors="replace").splitlines()
            raise RuntimeError(next(filter(_IS_CAUSE.match, lines), *lines[:1])) from None
        finally:
            os.dup2(own_errors, 2)
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield spark
        finally:
            spark.stop()
    except UsageInputError:
        Path(log).unlink()
        raise
    except Exception as error:
        raise RuntimeError(f"Spark failed: {cause_of(error)}; its log: {log}") from None
    else:
        Path(log).unlink()
    finally:
        os.close(descriptor)
        os.close(own_errors)
