"""How many workers there are, and how they share the ports of brokers."""

from collections.abc import Iterator
from typing import Final

from proxy.config import endpoints
from proxy.config.fields import Conflict
from proxy.config.models import Config
from proxy.config.workers import AUTO

SHOWN_SHARES: Final = 3
"""So many workers' ports are written out for people."""


def share_of(ports: endpoints.PortRange, workers: int, number: int) -> endpoints.PortRange:
    """Return the part of the ports that a worker has, the `number`th from 0: all have as many.

    There must be a port for each. Of any free ports all may have any.
    """
    if ports.any_free:
        return ports
    size = len(ports) // workers
    first = ports.first + number * size
    return endpoints.PortRange(first, first + size - 1)


def find_port_conflicts(config: Config) -> Iterator[Conflict]:
    """Yield that a listener has fewer ports for brokers than there are workers."""
    workers = config.worker_count
    those = f"{workers} workers" + (" (auto)" if config.workers == AUTO else "")
    for at, listener in enumerate(config.listeners if workers > 1 else ()):
        loc, ports = ("listeners", at, "broker_ports"), listener.broker_ports
        if ports is None:
            message = f"is missing, and each of {those} needs a port of its own"
            fix = f"add it with {workers} ports, for example: broker_ports: 19100-"
            yield Conflict(loc, message, fix + str(19099 + workers))
        elif not ports.any_free and len(ports) < workers:
            message = f"{ports} has {_ports(len(ports))}, too few for {those}"
            each = "one for each worker" + ("" if listener.sni else " and broker")
            fix = f"write {workers} ports or more, {each}, or fewer workers"
            yield Conflict(loc, message, fix)


def find_port_hints(config: Config) -> Iterator[str]:
    """Yield a line for each listener, how its workers share the ports of brokers."""
    workers = config.worker_count
    if workers == 1:
        return
    for listener in config.listeners:
        ports = listener.broker_ports
        if ports is None:
            continue
        place = f"workers: {workers}, listener {listener.name}"
        if ports.any_free:
            yield f"{place}: each worker takes any free port for each broker"
            continue
        if listener.sni is not None:
            last = ports.first + workers - 1
            yield f"{place}: the workers have ports {ports.first} to {last}, with all brokers each"
            continue
        parts = [str(share_of(ports, workers, number)) for number in range(workers)]
        shown = ", ".join(parts[:SHOWN_SHARES]) + (", ..." if workers > SHOWN_SHARES else "")
        size = len(share_of(ports, workers, 0))
        ids = "id 0" if size == 1 else f"ids 0 to {size - 1}"
        yield (
            f"{place}: each worker has {_ports(size)} ({shown}), for brokers with {ids}; fix, if "
            "there are others: widen broker_ports"
        )


def _ports(count: int) -> str:
    return "1 port" if count == 1 else f"{count} ports"
