"""Machines of one tier, each a proxy with workers, and what tests do to them."""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

from parts.reports import ReportingDriver, batch_document
from support.machine import machine_config, told_port, worker_pids
from support.operating import call
from support.proxy_process import ProxyProcess, until
from support.raw import RawClient, fetch

from proxy.tier.slot_map import SLOTS

SETTLED_S = 240.0
TRIED = 200


def tier_config(
    bootstrap: str, tier: str, machine: str, workers: int = 1, **parts: Any
) -> dict[str, Any]:
    """Make the configuration of one machine; the state is in a topic of the tier's name."""
    state = {"kind": "kafka", "topic": f"{tier}-state"}
    settings = machine_config(bootstrap, workers, **parts)
    return {**settings, "tier": {"name": tier, "machine": machine}, "state": state}


class TierMachine(ProxyProcess):
    """One machine."""

    def __init__(self, config: dict[str, Any], folder: Path, arguments: Any = ()) -> None:
        super().__init__(config, folder, arguments)
        self.name = str(config["tier"]["machine"])
        first, _, last = config["listeners"][0]["broker_ports"].partition("-")
        self.broker_ports = range(int(first), int(last) + 1)

    def slots(self) -> int:
        """Return how many slots it owns; 0 while it does not answer."""
        with suppress(OSError):
            return int(self.metrics().value("slots_owned"))
        return 0

    def is_settled(self) -> bool:
        """Return whether it knows of no slot that is to move; False while it does not answer."""
        with suppress(OSError):
            status, text = self.get("/v1/tier")
            return status == HTTPStatus.OK and bool(json.loads(text)["settled"])
        return False

    def crash(self) -> None:
        """Kill its launcher, and with it all of its workers, at once."""
        pids = list(worker_pids(self).values())
        self.kill()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Have it and its workers stand still."""
        self._send(signal.SIGSTOP)

    def unfreeze(self) -> None:
        """Have them go on."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in (self.pid, *worker_pids(self).values()):
            os.kill(pid, number)

    def put(self, path: str, document: Any) -> Any:
        """Send a document to its admin port; return the answer's."""
        body = json.dumps(document).encode()
        request = urllib.request.Request(
            f"{self.admin_url}{path}",
            data=body,
            method="PUT",
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read())


def until_shared(*machines: TierMachine, least: int = 1) -> None:
    """Wait until these have all slots among them, each some, and none is to move."""

    def are_shared() -> bool:
        counts = [machine.slots() for machine in machines]
        is_shared = sum(counts) == SLOTS and min(counts) >= least
        return is_shared and all(map(TierMachine.is_settled, machines))

    until(are_shared, "all slots are shared", SETTLED_S)


@contextmanager
def serving(machines: Sequence[TierMachine], least: int = 1) -> Iterator[None]:
    """Start these and wait as `until_shared`; kill them in the end."""
    try:
        for machine in machines:
            machine.start()
        until_shared(*machines, least=least)
        yield
    finally:
        for machine in machines:
            machine.kill()


def owner_of(machines: Sequence[TierMachine], client_id: str) -> TierMachine:
    """Return the machine of these to which the first one sends a client."""

    def owner() -> TierMachine | None:
        with suppress(OSError, EOFError):  # as it takes over another process's place, or ends
            port = told_port(machines[0], client_id)
            return next((each for each in machines if port in each.broker_ports), None)
        return None

    found: TierMachine = until(owner, f"{client_id} is sent to one of these")
    return found


def client_of(machines: Sequence[TierMachine], machine: TierMachine, prefix: str) -> str:
    """Return a client id, that begins so, of a client that a machine owns."""
    names = [f"{prefix}-{number}" for number in range(TRIED)]

    def owned() -> str | None:
        return next((name for name in names if owner_of(machines, name) is machine), None)

    found: str = until(owned, f"clients are sent to {machine.name}")  # while it is silent none are
    return found


def report_to(
    machines: Sequence[TierMachine], machine: TierMachine, prefix: str, topic: str
) -> str:
    """Report a batch of a query that a machine owns; return its client id, which begins so.

    Slots may move at any time: a client that went elsewhere meanwhile is left for another one.
    """

    def reported() -> str | None:
        client_id = client_of(machines, machine, prefix)
        port = told_port(machine, client_id)
        if port not in machine.broker_ports:
            return None
        with RawClient(f"127.0.0.1:{port}", client_id) as client:
            client.ask(fetch(12, topic))  # so that it is known
        driver = ReportingDriver(client_id, client_id, *(str(uuid4()) for _ in range(3)))
        report = driver.document("progress", batch=batch_document(0, 0, 0, topic))
        is_taken = call(machine, "POST", "/v1/spark/batches", report).status == HTTPStatus.OK
        return client_id if is_taken else None

    found: str = until(reported, f"{machine.name} takes a report", SETTLED_S)
    return found
