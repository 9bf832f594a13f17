"""The program that copies usage to Parquet, as spark-submit runs it, for a test to kill."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from examples.devkit.jars import connector_jars
from proxy.spark.usage import usage_stream

START_S = 250
"""For a JVM to start and store a batch or two, on a machine that is busy with much else."""
POLL_S = 0.1


@contextmanager
def usage_driver(
    bootstrap: str, topic: str, out: Path, batch: int = 100
) -> Iterator[subprocess.Popen[bytes]]:
    """Run it on its own, with nothing of ours to import; kill it in the end."""
    arguments = ("--jars", ",".join(map(str, connector_jars())), "--master", "local[1]")
    settings = ("--conf", "spark.ui.enabled=false", "--conf", "spark.driver.host=127.0.0.1")
    log = out.with_name("usage-driver.log").open("wb")
    process = subprocess.Popen(
        [
            *(Path(pyspark.__file__).parent / "bin" / "spark-submit", *arguments, *settings),
            *(usage_stream.__file__, "--bootstrap-servers", bootstrap, "--topic", topic),
            *("--out", out, "--trigger", "0 seconds"),
            *("--option", f"maxOffsetsPerTrigger={batch}"),
        ],
        env={**os.environ, "PYTHONPATH": "", "PYSPARK_PYTHON": sys.executable},
        start_new_session=True,
        stderr=log,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        log.close()


def until_stored(process: subprocess.Popen[bytes], out: Path, files: int) -> None:
    """Wait until there are so many files with records."""
    deadline = time.monotonic() + START_S
    while len([*out.glob("usage/*/*.parquet")]) < files:
        assert process.poll() is None, out.with_name("usage-driver.log").read_text()
        assert time.monotonic() < deadline, f"no {files} files in {START_S} s"
        time.sleep(POLL_S)
