"""How many workers there are, and how they share the ports of brokers."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from proxy.config import endpoints
from proxy.config.document import ConfigProblem, Loc, YamlDocument
from proxy.config.models import Config
from proxy.config.workers import count_workers, parse_workers
from proxy.quota.values import BadValueError

SHOWN_SHARES: Final = 3
"""So many workers' ports are written out for people."""


def share_of(ports: endpoints.PortRange, workers: int, number: int) -> endpoints.PortRange:
    """Return the part of the ports that a worker has, the `number`th from 0: all have as many.

    There must be a port for each. Of any free ports all may have any.
    """
    if ports.any_free:
        return ports
    size = (ports.last - ports.first + 1) // workers
    first = ports.first + number * size
    return endpoints.PortRange(first, first + size - 1)


def find_port_problems(
    document: YamlDocument, listeners: Iterable[tuple[Loc, Mapping[str, object]]]
) -> Iterator[ConfigProblem]:
    """Yield that a listener has fewer ports for brokers than there are workers."""
    try:
        wanted = parse_workers(document.data.get("workers", 1))
    except BadValueError:
        return  # its model says so
    workers = count_workers(wanted)
    if workers == 1:
        return
    those = f"{workers} workers" if wanted != "auto" else f"{workers} workers (auto)"
    for loc, listener in listeners:
        if "broker_ports" not in listener:
            if _names_brokers(listener):
                message = f"is missing, and each of {those} needs a port of its own"
                fix = f"add it with {workers} ports, for example: broker_ports: 19100-"
                fix += str(19100 + workers - 1)
                yield document.problem((*loc, "broker_ports"), message, fix)
            continue
        try:
            ports = endpoints.parse_broker_ports(listener["broker_ports"])
        except BadValueError:
            continue
        count = ports.last - ports.first + 1
        if not ports.any_free and count < workers:
            message = f"{ports} has {_ports(count)}, too few for {those}"
            each = "one for each worker"
            if not _names_brokers(listener):
                each += " and broker"
            fix = f"write {workers} ports or more, {each}, or fewer workers"
            yield document.problem((*loc, "broker_ports"), message, fix)


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
        if listener.tls is not None and listener.tls.sni is not None:
            last = ports.first + workers - 1
            yield f"{place}: the workers have ports {ports.first} to {last}, with all brokers each"
            continue
        parts = [str(share_of(ports, workers, number)) for number in range(workers)]
        shown = ", ".join(parts[:SHOWN_SHARES]) + (", ..." if workers > SHOWN_SHARES else "")
        share = share_of(ports, workers, 0)
        size = share.last - share.first + 1
        ids = "id 0" if size == 1 else f"ids 0 to {size - 1}"
        yield (
            f"{place}: each worker has {_ports(size)} ({shown}), for brokers with {ids}; fix, if "
            "there are others: widen broker_ports"
        )


def _ports(count: int) -> str:
    return "1 port" if count == 1 else f"{count} ports"


def _names_brokers(listener: Mapping[str, object]) -> bool:
    tls = listener.get("tls")
    return isinstance(tls, dict) and tls.get("sni") is not None
