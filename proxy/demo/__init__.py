"""The demo: a real Spark query held to its quota on a real broker, beside a client without one.

`runner` starts and watches the parts, each a process of its own: the broker (`proxy.devkit`), the
proxy, the query (`query`, also an example for users) and the client without quota (`neighbour`).
`data` fills the topic, `figures` reads what the proxy measures, `screen` and `plot` show it.
`backpressure` and `pipeline` are demos of their own; they share `jobs`, `trial`, `feed`, `streams`
and `verdict`. All three share `frame`, `parts`, `children`, `pace` and `canvas`.
"""

import importlib.util
from pathlib import Path

from proxy.devkit import DevkitError

MEGABYTES = 100
"""How much the query reads: at the example's bound of 2 MiB/s it takes about 50 s."""

OUT_DIR = Path("build/demo")
BACKPRESSURE_OUT_DIR = Path("build/demo-backpressure")
PIPELINE_OUT_DIR = Path("build/demo-pipeline")


class DemoError(DevkitError):
    """The demo can't go on."""


def run_demo(megabytes: int = MEGABYTES, out_dir: Path = OUT_DIR) -> int:
    """Run the demo of quotas and return 0, or raise one of the kinds of `DevkitError`.

    Args:
        megabytes: MiB of records to write and to read, 1 or more.
        out_dir: folder for the plot, the proxy's configuration and the logs of all parts. Files
            of an earlier run are replaced.

    """
    _require_modules()
    from proxy.demo.runner import run  # noqa: PLC0415 - imports what was just looked for

    return run(megabytes, out_dir.resolve())


def run_backpressure_demo(brief: bool = False, out_dir: Path = BACKPRESSURE_OUT_DIR) -> int:
    """Run the demo of backpressure; return 0, or 1 when a promise was not kept.

    Args:
        brief: a shorter run, too short for the loop to show all that it can.
        out_dir: as of `run_demo`.

    Raises one of the kinds of `DevkitError`.

    """
    _require_modules()
    from proxy.demo.backpressure.runner import BRIEF, FULL, run  # noqa: PLC0415 - as above

    return run(out_dir.resolve(), BRIEF if brief else FULL)


def run_pipeline_demo(brief: bool = False, out_dir: Path = PIPELINE_OUT_DIR) -> int:
    """Run the demo of pipelines; arguments, result and errors as of `run_backpressure_demo`."""
    _require_modules()
    from proxy.demo.pipeline.runner import BRIEF, FULL, run  # noqa: PLC0415 - as above

    return run(out_dir.resolve(), BRIEF if brief else FULL)


def _require_modules() -> None:
    for module in ("matplotlib", "pyspark"):
        if importlib.util.find_spec(module) is None:
            raise DemoError(
                f"The demo needs {module}, which is not installed.",
                "Run: pip install 'kafka-quota-proxy[demo]'",
            )
