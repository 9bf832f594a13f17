"""A real broker that clients reach directly or through HAProxy in TCP mode, with one thread.

The broker has two listeners: one tells its own address, the other tells HAProxy's.
"""

import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass

from bench import traffic
from bench.lab import Lab, Proxy
from bench.processes import BenchError
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.broker_settings import Quorum, new_cluster_id
from examples.devkit.loopback import free_ports

DIRECT, PROXY, HAPROXY = "direct", "proxy", "haproxy"
HOST = "127.0.0.1"
NODE_ID = 1
START_TIMEOUT_S = 10.0
POLL_S = 0.1
HAPROXY_CONFIG = """\
global
    nbthread 1
defaults
    mode tcp
    timeout connect 10s
    timeout client 10m
    timeout server 10m
listen kafka
    bind 127.0.0.1:{port}
    server broker 127.0.0.1:{upstream}
"""


@dataclass(frozen=True, slots=True)
class RealBroker:
    """Where a started broker is, where it is for HAProxy, and where HAProxy is to be."""

    port: int
    behind_haproxy: int
    haproxy: int

    @property
    def address(self) -> tuple[str, int]:
        """For clients that come directly."""
        return HOST, self.port

    @property
    def bootstrap(self) -> str:
        """The same as text."""
        return f"{HOST}:{self.port}"


def start_broker(lab: Lab, properties: Mapping[str, str]) -> RealBroker:
    """Start a broker with these properties; the lab stops it."""
    port, controller, behind_haproxy, haproxy = free_ports(4)
    plain = f"PLAINTEXT://{HOST}:{port}"
    listeners = (plain, f"BEHIND://{HOST}:{behind_haproxy}", f"CONTROLLER://{HOST}:{controller}")
    protocols = ",".join(f"{name}:PLAINTEXT" for name in ("PLAINTEXT", "BEHIND", "CONTROLLER"))
    lab.enter(
        EmbeddedBroker(
            lab.work_dir / "broker",
            port,
            properties={
                **properties,
                "listeners": ",".join(listeners),
                "advertised.listeners": f"{plain},BEHIND://{HOST}:{haproxy}",
                "listener.security.protocol.map": protocols,
            },
            node_id=NODE_ID,
            quorum=Quorum(new_cluster_id(), NODE_ID, controller),
        )
    )
    return RealBroker(port, behind_haproxy, haproxy)


def ways_to(lab: Lab, broker: RealBroker, proxy: Proxy) -> dict[str, str]:
    """Start HAProxy, if it is installed; return the bootstrap address of each way.

    Raises BenchError when HAProxy does not serve.
    """
    ways = {DIRECT: broker.bootstrap, PROXY: "{}:{}".format(*proxy.bootstrap)}
    if (haproxy := _start_haproxy(lab, broker)) is not None:
        ways[HAPROXY] = haproxy
    return ways


def _start_haproxy(lab: Lab, broker: RealBroker) -> str | None:
    """Start HAProxy and return its address as text; None: it is not installed."""
    program = shutil.which("haproxy", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if program is None:
        return None
    path = lab.work_dir / "haproxy-clients.cfg"
    path.write_text(HAPROXY_CONFIG.format(port=broker.haproxy, upstream=broker.behind_haproxy))
    child = lab.start_helper("haproxy", [program, "-db", "-f", str(path)])
    deadline_s = time.monotonic() + START_TIMEOUT_S
    address = HOST, broker.haproxy
    while True:
        try:
            if traffic.advertised_address(address, "bench-discovery") == address:
                return f"{HOST}:{broker.haproxy}"
            raise BenchError("the broker does not tell HAProxy's address to who comes that way")
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline_s:
                raise BenchError(f"haproxy does not serve: {error}{child.log_tail()}") from error
        time.sleep(POLL_S)
