"""The demo: real Spark queries on a real broker, and the proxy between them.

It runs from a checkout only. `frame` starts a broker and a proxy, each a process of its own, and
runs one of six scenarios: `quotas`, a query held to its quota beside a client without one,
`budgets`, queries and a backfill that share a link,
`backpressure` and `pipeline`, queries whose processing is slow for a while (`trial` runs them,
`queries` is their program, `jobs` what they do), `tier`, three members of which one is killed, and
`usage`, four teams and the report on what they used.
"""

import importlib
import importlib.util
import os
from pathlib import Path

from examples.devkit import DevkitError

CHECKOUT = Path(__file__).parents[2]


class DemoError(DevkitError):
    """The demo can't go on."""


def run_demo(scenario: str, megabytes: int | None = None, brief: bool = False) -> int:
    """Run a scenario, and leave picture, configuration and logs in build/; return the exit code.

    Args:
        scenario: quotas, budgets, backpressure, pipeline, tier or usage.
        megabytes: MiB of records that the query of quotas reads, 1 or more.
        brief: of the others: a shorter run, too short for the loop to show all that it can.

    Returns 1 when a promise was not kept; raises one of the kinds of `DevkitError`.

    """
    for module in ("matplotlib", "pyspark"):
        if importlib.util.find_spec(module) is None:
            raise DemoError(
                f"The demo needs {module}, which is not installed.",
                "Run: pip install 'kafka-quota-proxy[demo]'",
            )
    # The demo's processes are modules of this package, which is not installed.
    paths = (str(CHECKOUT), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    shown = importlib.import_module(f"examples.demo.{scenario}")  # needs what was just looked for
    code: int = shown.SCENARIO.run(megabytes, brief)
    return code
