"""A proxy with several workers, and what tests do to its processes."""

import json
import os
import signal
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml
from support.proxy_process import HOST, ProxyProcess, config, until
from support.raw import RawClient, message

from examples.devkit.loopback import free_ports
from proxy.wire.apis import METADATA

MACHINE = "machine"

PORTS_FOR_EACH = 2
"""Where there is one broker: the embedded one has the id 1."""


def free_range(count: int) -> str:
    """Give ports in a row that nobody listens on now, as `broker_ports` has them."""
    ports = free_ports(count)
    return f"{ports[0]}-{ports[-1]}"


def machine_config(bootstrap: str, workers: int, *, nodes: int = 1, **parts: Any) -> dict[str, Any]:
    """Make a configuration with so many workers on ports of their own; several have a tier.

    The brokers have the ids 1 to `nodes`.
    """
    listener = {
        "bind": f"{HOST}:{free_ports(1)[0]}",
        "broker_ports": free_range(workers * (nodes + 1)),
    }
    settings = {**config(bootstrap, listeners=[listener], **parts), "workers": workers}
    return in_tier(settings) if workers > 1 else settings


def admin_ports(workers: int) -> dict[str, str]:
    """Make the section of an admin port, with those of so many members behind it."""
    first, _, _ = free_range(1 + workers).partition("-")
    return {"bind": f"{HOST}:{first}"}


def in_tier(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with a tier of its own, which several workers need."""
    tier = f"tier-{uuid4().hex[:8]}"
    return {
        **settings,
        "tier": {"name": tier, "machine": MACHINE},
        "state": {"kind": "kafka", "topic": f"{tier}-state"},
    }


def broker_ports(machine: ProxyProcess, workers: int, node_id: int = 1) -> list[str]:
    """Give the address of a broker's port at each worker, as its configuration has it."""
    settings = yaml.safe_load(machine.config_file.read_text())
    first, last = map(int, settings["listeners"][0]["broker_ports"].split("-"))
    each = (last - first + 1) // workers
    return [f"{HOST}:{first + number * each + node_id}" for number in range(workers)]


def worker_pids(machine: ProxyProcess) -> dict[int, int]:
    """Give the latest process of each worker, by its number."""
    return {line["worker"]: line["process"] for line in machine.log("worker serves")}


def kill_worker(machine: ProxyProcess, number: int) -> int:
    """Kill a worker as a crash does; return its process."""
    pid = worker_pids(machine)[number]
    os.kill(pid, signal.SIGKILL)
    return pid


def until_replaced(machine: ProxyProcess, number: int, pid: int) -> None:
    """Wait until another process serves in the place of a worker."""
    until(lambda: worker_pids(machine)[number] != pid, f"worker {number} is back")


def until_settled(machine: ProxyProcess, workers: int) -> None:
    """Wait until each member owns slots, and none is on its way to another."""

    def is_settled() -> bool:
        status, text = machine.get("/v1/tier")
        if status != HTTPStatus.OK:
            return False
        told = json.loads(text)
        members = told["members"]
        shared = len(members) == workers and all(each["owned"] for each in members)
        return bool(told["settled"]) and shared

    until(is_settled, "each member owns slots")


def is_gone(pid: int) -> bool:
    """Return whether a process has ended, with all its threads: until then its sockets are open."""
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state == "Z" and len(list((process / "task").iterdir())) == 1
    except (FileNotFoundError, ProcessLookupError):
        return True


def told_port(machine: ProxyProcess, client_id: str, node_id: int = 1) -> int:
    """Return the port of a broker as a client is told it."""
    with RawClient(machine.bootstrap, client_id) as client:
        brokers = client.ask(message(METADATA, 1, topics=[])).brokers
    return next(int(each.port) for each in brokers if each.node_id == node_id)


def owner_of(machine: ProxyProcess, client_id: str, workers: int) -> int:
    """Return the number of the worker that owns a client, by the address that it is told."""
    ports = [int(each.rpartition(":")[2]) for each in broker_ports(machine, workers)]
    return ports.index(told_port(machine, client_id))
