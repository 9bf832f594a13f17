"""The demo: a real Spark query held to its quota on a real broker, beside a client without one.

`runner` starts and watches the parts, each a process of its own: the broker (`proxy.devkit`), the
proxy, the query (`query`, also an example for users) and the client without quota (`neighbour`).
`data` fills the topic, `figures` reads what the proxy measures, `screen` and `plot` show it.
"""

import importlib.util
from pathlib import Path

from proxy.devkit import DevkitError

MEGABYTES = 100
"""How much the query reads: at the example's bound of 2 MiB/s it takes about 50 s."""

OUT_DIR = Path("build/demo")


class DemoError(DevkitError):
    """The demo can't go on."""


def run_demo(megabytes: int = MEGABYTES, out_dir: Path = OUT_DIR) -> int:
    """Run the demo and return 0, or raise one of the kinds of `DevkitError`.

    Args:
        megabytes: MiB of records to write and to read, 1 or more.
        out_dir: folder for the plot, the proxy's configuration and the logs of all parts. Files
            of an earlier run are replaced.

    """
    for module in ("matplotlib", "pyspark"):
        if importlib.util.find_spec(module) is None:
            raise DemoError(
                f"The demo needs {module}, which is not installed.",
                "Run: pip install 'kafka-quota-proxy[demo]'",
            )
    from proxy.demo.runner import run  # noqa: PLC0415 - imports what was just looked for

    return run(megabytes, out_dir.resolve())
