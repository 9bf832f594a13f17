"""Kafka's own `kafka-configs.sh`: its main class, run with the embedded broker's jars."""

import os
import subprocess

from proxy.devkit.broker import QUICK_START
from proxy.devkit.jars import kafka_jars
from proxy.devkit.java import find_java

TIMEOUT_S = 60
QUIET = "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"


def alter_quotas(bootstrap: str, change: str, *entity: str) -> None:
    """Change client quotas as an operator does.

    `change` is such as `+consumer_byte_rate=1000,request_percentage=5` or `-consumer_byte_rate`;
    `entity` are the tool's arguments, such as `--entity-type clients --entity-name etl`.
    """
    option = "--add-config" if change[0] == "+" else "--delete-config"
    class_path = os.pathsep.join(map(str, kafka_jars()))
    java = [str(find_java()), *QUICK_START, QUIET, "-cp", class_path, "kafka.admin.ConfigCommand"]
    done = subprocess.run(
        [*java, "--bootstrap-server", bootstrap, "--alter", option, change[1:], *entity],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Completed updating" in done.stdout, done.stdout
