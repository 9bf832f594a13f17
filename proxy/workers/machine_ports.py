"""Opens the ports of a machine and says which worker has which.

The supervisor keeps every socket: while a worker is down, what connects to it waits.
"""

import socket
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from structlog import get_logger

from proxy.cluster.upstream import Address
from proxy.config import Config, ListenerSection
from proxy.config.worker_ports import share_of
from proxy.members.slot_map import ListenerPorts, MemberAddresses
from proxy.relay.listener import SNI_PORT
from proxy.relay.ports import ListenerError, close_all, open_port, open_ports, steer, take_over_port

_log = get_logger(__name__)

Sockets = Mapping[int | None, socket.socket]
"""By their brokers, as `Listener.use` takes them."""


class MachinePorts:
    """The sockets of all workers."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._sections = {listener.name: listener for listener in config.listeners}
        self._count = config.worker_count
        self._bootstrap: dict[str, list[socket.socket]] = {}
        self._brokers: dict[str, list[dict[int, socket.socket]]] = {}
        """By listener, then of each worker, by broker."""
        self._before: Counter[Address] = Counter()

    def open(self, beside: Collection[Address] | None = None) -> None:
        """Open all ports, as `Listener.open`. Raises ListenerError; then none is open."""
        self._before = Counter(beside)
        try:
            for name, listener in self._sections.items():
                host, port = listener.bind.host, listener.bind.port
                self._bootstrap[name] = open_ports(name, host, port, self._count, beside)
                of_workers = self._brokers[name] = [{} for _ in range(self._count)]
                for number, sockets in enumerate(of_workers):
                    for node_id, port in _broker_ports(listener, self._count, number):
                        sockets[node_id] = open_port(name, host, port, beside)
        except BaseException:
            self.close()
            raise

    def hold(self, number: int, found: Mapping[str, Mapping[int, int]]) -> None:
        """Open ports again that a worker had opened by itself, which has ended; and keep them.

        One that somebody else has got meanwhile is another one with the next worker.
        """
        for name, ports in found.items():
            held = self._brokers[name][number]
            for node_id in ports.keys() - held.keys():
                host = self._sections[name].bind.host
                try:
                    held[node_id] = open_port(name, host, ports[node_id])
                except ListenerError as error:
                    _log.error("a broker's port is lost", error=str(error), worker=number)

    def take_over(self) -> None:
        """Have new connections come here, as `Listener.take_over`. Raises ListenerError."""
        for name, group in self._groups():
            take_over_port(name, group, self._before)

    def take_back(self) -> None:
        """Have new connections come here again, and none to the one that took them over."""
        for _, group in self._groups():
            steer(group[0], 0, len(group))

    def close(self) -> None:
        """Close the supervisor's copies; those that share a port in one go."""
        for _, group in self._groups():
            close_all(group)
        self._bootstrap.clear()
        self._brokers.clear()

    def addresses(self) -> Iterator[Address]:
        """Yield where each socket listens."""
        for _, group in self._groups():
            for sock in group:
                yield sock.getsockname()[:2]

    def bootstrap_ports(self) -> Iterator[tuple[str, str, int]]:
        """Yield name, host and bootstrap port of each listener."""
        for name, sockets in self._bootstrap.items():
            yield name, self._sections[name].bind.host, int(sockets[0].getsockname()[1])

    def of(self, number: int) -> Mapping[str, Sockets]:
        """Return a worker's sockets by listener."""
        found: dict[str, Sockets] = {}
        for name, sockets in self._bootstrap.items():
            of_brokers: Mapping[int, socket.socket] = self._brokers[name][number]
            found[name] = {None: sockets[number]} | {each: of_brokers[each] for each in of_brokers}
        return found

    def member(
        self, name: str, number: int, found: Mapping[str, Mapping[int, int]]
    ) -> MemberAddresses:
        """Return what clients are told of a worker; `found` are ports that it opened by itself."""
        listeners = {}
        for listener, section in self._sections.items():
            sockets = self._brokers[listener][number]
            by_broker = {each: int(sock.getsockname()[1]) for each, sock in sockets.items()}
            sni = section.tls.sni if section.tls is not None else None
            sni = None if sni is None else self._config.named(sni)
            ports = section.broker_ports
            first = last = None
            if sni is not None:
                first = by_broker.pop(SNI_PORT, None)
            elif ports is not None and not ports.any_free:
                share = share_of(ports, self._count, number)
                first, last = share.first, share.last
            listeners[listener] = ListenerPorts(
                host=self._config.named(section.advertised_host),
                bootstrap_port=int(self._bootstrap[listener][number].getsockname()[1]),
                first=first,
                last=last,
                sni=sni,
                ports=found.get(listener, {}),
            )
        return MemberAddresses(name, listeners)

    def _groups(self) -> Iterator[tuple[str, Sequence[socket.socket]]]:
        """Yield the sockets that share a port, with the name of their listener."""
        for name, sockets in self._bootstrap.items():
            yield name, sockets
            for of_worker in self._brokers.get(name, ()):
                for sock in of_worker.values():
                    yield name, (sock,)


def _broker_ports(
    listener: ListenerSection, workers: int, number: int
) -> Iterator[tuple[int, int]]:
    """Yield the brokers, and their ports, of one worker; SNI_PORT stands for all of them."""
    ports = listener.broker_ports
    if listener.tls is not None and listener.tls.sni is not None:
        first = 0 if ports is None or ports.any_free else ports.first + number
        yield SNI_PORT, first
    elif ports is not None and not ports.any_free:
        share = share_of(ports, workers, number)
        yield from enumerate(range(share.first, share.last + 1))
