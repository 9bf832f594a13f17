"""Starts the demo's processes and reads what they say of themselves."""

import re
from dataclasses import dataclass
from pathlib import Path

from proxy.demo import DemoError
from proxy.demo.children import Child
from proxy.demo.data import TOPIC
from proxy.demo.figures import LIMITED, UNLIMITED
from proxy.devkit.jars import connector_jars

HOST = "127.0.0.1"
PROXY_TIMEOUT_S = 20.0
UNLIMITED_BYTES_PER_S = 4 * 1024 * 1024
"""A modest pace, some times the query's bound."""
EXAMPLES = Path(__file__).parents[2] / "examples"
READY_LINE = "ready"

_BOOTSTRAP = re.compile(r"^(\s*bootstrap_servers:).*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the proxy listens."""

    bootstrap: str
    """`HOST:PORT` for Kafka clients."""
    admin_url: str


def write_config(broker: str, path: Path, example: str) -> None:
    """Copy the example with the broker's address in it, so that users can look at what ran.

    Raises `DemoError` when the example can't be read.
    """
    try:
        text = (EXAMPLES / example).read_text(encoding="utf-8")
    except OSError as error:
        raise DemoError(
            f"The demo's configuration can't be read: {error}",
            "Run the demo from a checkout of the project: make demo",
        ) from error
    path.write_text(_BOOTSTRAP.sub(rf"\1 [{broker}]", text), encoding="utf-8")


def start_proxy(config: Path, out_dir: Path) -> Child:
    """Start the proxy as a user would; `await_proxy` waits for it."""
    return Child("proxy", "proxy", ["run", "--config", str(config)], out_dir)


def await_proxy(proxy: Child) -> Addresses:
    """Return once the proxy is ready, with the ports from its log; raises `DemoError`."""

    def find() -> Addresses | None:
        if READY_LINE not in proxy.lines():
            return None
        ports = {line.get("event"): line.get("port") for line in proxy.objects()}
        return Addresses(f"{HOST}:{ports['listening']}", f"http://{HOST}:{ports['admin']}")

    return proxy.wait_for(find, "opened its ports", PROXY_TIMEOUT_S)


def start_query(bootstrap: str, work_dir: Path, out_dir: Path) -> Child:
    """Start the Spark query, with rows and checkpoint in `work_dir`."""
    arguments = ["--bootstrap", bootstrap, "--client-id", LIMITED, "--topic", TOPIC]
    arguments += ["--jars", ",".join(map(str, connector_jars())), "--work-dir", str(work_dir)]
    return Child("query", "proxy.demo.query", arguments, out_dir)


def start_neighbour(bootstrap: str, out_dir: Path) -> Child:
    """Start the client without quota."""
    arguments = ["--bootstrap", bootstrap, "--client-id", UNLIMITED, "--topic", TOPIC]
    arguments += ["--bytes-per-second", str(UNLIMITED_BYTES_PER_S)]
    return Child("neighbour", "proxy.demo.neighbour", arguments, out_dir)


def said(child: Child) -> dict[str, float]:
    """Give the figures that the child has printed, the latest of each name."""
    return {name: value for line in child.objects() for name, value in line.items()}
