"""Runs Kafka's own tools of measurement, `kafka-producer-perf-test` and `kafka-consumer-perf-test`.

Each gives what it measured itself, so that the start of its JVM does not count.
"""

import os
import re
import subprocess
from pathlib import Path

from bench.processes import BenchError
from examples.devkit.jars import KAFKA_VERSION, JarSet, fetch, kafka_jars
from examples.devkit.java import find_java

PRODUCER = "org.apache.kafka.tools.ProducerPerformance"
CONSUMER = "org.apache.kafka.tools.ConsumerPerformance"
# The heap that Kafka's scripts give to a tool.
JVM_OPTIONS = ("-Xmx512M", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
TIMEOUT_S = 180.0
UNLIMITED = -1
MEBIBYTE = 1 << 20
_SENT = re.compile(r"^(\d+) records sent, .*\(([0-9.]+) MB/sec\)", re.MULTILINE)


def write_rate(bootstrap: str, topic: str, records: int, record_bytes: int) -> float:
    """Let the tool write so many records; return bytes per second."""
    output = _run(
        PRODUCER,
        f"--topic={topic}",
        f"--num-records={records}",
        f"--record-size={record_bytes}",
        f"--throughput={UNLIMITED}",
        *("--producer-props", f"bootstrap.servers={bootstrap}"),
    )
    # Lines on the way count their own part; the last one counts all.
    *_, (sent, mebibytes_per_s) = _SENT.findall(output) or [("0", "0")]
    if int(sent) != records:
        raise BenchError(f"the tool did not write {records} records:\n{output}")
    return float(mebibytes_per_s) * MEBIBYTE


def read_rate(bootstrap: str, topic: str, records: int, _record_bytes: int) -> float:
    """Let the tool read so many records; return bytes per second, joining its group left out."""
    output = _run(
        CONSUMER, f"--bootstrap-server={bootstrap}", f"--topic={topic}", f"--messages={records}"
    )
    names, *lines = (line.split(", ") for line in output.splitlines() if ", " in line)
    found = dict(zip(names, lines[-1], strict=True)) if lines else {}
    if int(found.get("data.consumed.in.nMsg", 0)) < records:
        raise BenchError(f"the tool did not read {records} records:\n{output}")
    return float(found["fetch.MB.sec"]) * MEBIBYTE


def _run(tool: str, *arguments: str) -> str:
    class_path = os.pathsep.join(map(str, (*kafka_jars(), *_tool_jars())))
    command = [str(find_java()), *JVM_OPTIONS, "-cp", class_path, tool, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"{tool}: {error}") from error
    if done.returncode:
        raise BenchError(f"{tool}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _tool_jars() -> tuple[Path, ...]:
    """Give what the tools need beside the broker's jars."""
    present = frozenset(re.sub(r"-\d.*", "", jar.name) for jar in kafka_jars())
    module = f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"
    return fetch(JarSet(f"kafka-tools-{KAFKA_VERSION}", (module,), present))
