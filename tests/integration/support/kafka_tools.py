"""Kafka's own tools: their main classes, run with the embedded broker's jars."""

import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from examples.devkit.broker import QUICK_START
from examples.devkit.jars import KAFKA_VERSION, JarSet, fetch, kafka_jars
from examples.devkit.java import find_java

TIMEOUT_S = 60
QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def run_tool(
    tool: str, bootstrap: str, *arguments: str, jars: Iterable[Path] = (), errors: bool = False
) -> str:
    """Run a main class; return what it printed, with its log if `errors` is set.

    `jars` are those it needs beside the broker's.
    """
    class_path = os.pathsep.join(map(str, (*kafka_jars(), *jars)))
    java = [str(find_java()), *QUICK_START, QUIET, "-cp", class_path, tool]
    done = subprocess.run(
        [*java, "--bootstrap-server", bootstrap, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr if errors else done.stdout


def tool_jars() -> tuple[Path, ...]:
    """Give what the tools outside the broker need beside its jars."""
    present = frozenset(re.sub(r"-\d.*", "", jar.name) for jar in kafka_jars())
    module = f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}"
    return fetch(JarSet(f"kafka-tools-{KAFKA_VERSION}", (module,), present))
