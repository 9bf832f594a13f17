"""Who is connected: a row for each connection, their rates, and closing one of them."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from metrics.clock import MS_PER_SECOND, clock_ms
from proxy.quota.entities import CONNECTION_RATE, REQUEST_PERCENTAGE, ClientIdentity, QuotaKind
from proxy.quota.meter import Meter
from proxy.quota.rules import Rule
from proxy.relay.channel import TRAFFIC_INTERVAL_MS
from proxy.relay.connection import Connection
from proxy.relay.lifecycle import ReadPauseReason

CLOSED_BY_OPERATOR = "closed by an operator"

FIRST_RATE_MS = MS_PER_SECOND
"""A connection that is younger has no rate yet."""

Where = Literal[
    "delay_queue",
    "muted",
    "gate",
    "connection_rate",
    "one_at_a_time",
    "login",
    "in_flight",
    "client_not_reading",
    "broker_not_reading",
]
"""What keeps a connection waiting; docs/api.md explains each."""


@dataclass(frozen=True, slots=True)
class HoldReason:
    """Why a connection does not go on now."""

    where: Where
    kind: QuotaKind | None = None
    """The quota that holds it; None when none does."""
    entity: str | None = None
    """Whose traffic that quota adds up."""
    rule: Rule | None = None
    """The rule behind it, of a client or of a budget."""
    until_ms: float | None = None
    """On the monotonic clock; None when that is not known."""


@dataclass(frozen=True, slots=True)
class ConnectionRow:
    """One open connection."""

    number: int
    """Its own for as long as the process runs; later ones have higher ones."""
    ip: str
    """Of the client."""
    port: int
    listener: str
    user: str | None
    client_id: str | None
    """None too while nothing is known yet."""
    node_id: int | None
    """The broker that the client asked for; None: it came to the bootstrap port."""
    broker: str | None
    """Where the proxy is connected to for it, as `HOST:PORT`; None when it is not."""
    began_ms: float
    """On the monotonic clock."""
    state: str
    received_rate: float | None
    """Bytes per second from the client; None before they were measured."""
    sent_rate: float | None
    """Bytes per second to the client."""
    in_flight: int
    """Requests without an answer."""
    hold: HoldReason | None

    @property
    def rate(self) -> float:
        """Both directions together, 0 before they were measured."""
        return (self.received_rate or 0.0) + (self.sent_rate or 0.0)


class ConnectionList:
    """The connections of a relay, as they come and go. Iterators go in small steps."""

    def __init__(self, connections: Collection[Connection]) -> None:
        self._connections = connections
        self._measured_ms = clock_ms()
        self.client_rates: Mapping[ClientIdentity, float] = {}
        """Bytes per second of each client, in both directions, when that was last measured."""
        self.client_exchanges: Mapping[ClientIdentity, float] = {}
        """Requests with their responses per second, roughly; both are new ones each time."""

    def measuring(self, now_ms: float) -> Iterator[None]:
        """Measure all connections, if it is time to; run it every second or so."""
        if now_ms - self._measured_ms < TRAFFIC_INTERVAL_MS:
            return
        self._measured_ms = now_ms
        rates: dict[ClientIdentity, float] = {}
        exchanges: dict[ClientIdentity, float] = {}
        for connection in tuple(self._connections):
            traffic, session = connection.traffic, connection.client.current
            traffic.measure(connection.channel.sock, clock_ms())
            if session is not None:
                rate = (traffic.received_rate or 0.0) + (traffic.sent_rate or 0.0)
                client = session.identity
                rates[client] = rates.get(client, 0.0) + rate
                exchanges[client] = exchanges.get(client, 0.0) + traffic.exchange_rate
            yield
        self.client_rates, self.client_exchanges = rates, exchanges

    def rows(self) -> Iterator[ConnectionRow]:
        """Yield a row for each connection that is open."""
        for connection in tuple(self._connections):
            if connection in self._connections:
                yield row_of_connection(connection, clock_ms())

    def close(self, number: int) -> ConnectionRow | None:
        """Close a connection as a broker would; return what it was, None if it is not there."""
        found = (each for each in self._connections if each.number == number)
        connection = next(found, None)
        if connection is None:
            return None
        row = row_of_connection(connection, clock_ms())
        connection.close_abandoned(CLOSED_BY_OPERATOR)
        return row


def row_of_connection(connection: Connection, now_ms: float) -> ConnectionRow:
    """Return what there is to show of a connection."""
    origin, session, traffic = connection.origin, connection.client.current, connection.traffic
    if traffic.sent_rate is None and now_ms - connection.began_ms >= FIRST_RATE_MS:
        traffic.measure(connection.channel.sock, now_ms)
    known = session if session is not None else connection.client.slot
    identity = known.identity if known is not None else None
    broker = None
    if connection.upstream is not None:
        with suppress(OSError):
            host, port, *_ = connection.upstream.sock.getpeername()
            broker = f"{host}:{port}"
    return ConnectionRow(
        number=connection.number,
        ip=origin.ip,
        port=origin.port,
        listener=origin.name,
        user=identity.user if identity is not None else None,
        client_id=identity.client_id if identity is not None else None,
        node_id=origin.node_id,
        broker=broker,
        began_ms=connection.began_ms,
        state=connection.life.state.value,
        received_rate=traffic.received_rate,
        sent_rate=traffic.sent_rate,
        in_flight=len(connection.in_flight),
        hold=_hold_of(connection),
    )


def _hold_of(connection: Connection) -> HoldReason | None:
    session, pauses = connection.client.current, connection.life.pauses
    delayed, crowded = connection.responses.delayed, connection.crowded
    slot = connection.client.slot
    if delayed.waiting:
        charge = connection.in_flight[0].charge if connection.in_flight else None
        return _hold("delay_queue", None if charge is None else charge.meter, delayed.due_ms)
    if crowded.waiting and slot is not None:
        match = connection.services.quotas.table.match(CONNECTION_RATE, slot.identity)
        rule, due_ms = match.rule if match is not None else None, crowded.due_ms
        return HoldReason("connection_rate", CONNECTION_RATE, slot.paced_as, rule, due_ms)
    if connection.muted.waiting and (charge := connection.muted_for) is not None:
        return _hold("muted", charge.meter, connection.muted.due_ms)
    if ReadPauseReason.GATED in pauses:
        waiter = connection.waiter
        until_ms = waiter.wakes_ms if waiter.wakes_ms < math.inf else None
        return _hold("gate", waiter.meter, until_ms)
    if ReadPauseReason.SERIAL in pauses:
        meters = {} if session is None else session.quotas.meters
        return _hold("one_at_a_time", meters.get(REQUEST_PERCENTAGE), None)
    waits: dict[Where, bool] = {
        "login": ReadPauseReason.LOGIN in pauses,
        "client_not_reading": connection.responses.sending_blocked,
        "broker_not_reading": connection.requests.sending_blocked,
        "in_flight": ReadPauseReason.FULL in pauses,
    }
    return next((HoldReason(where) for where, is_so in waits.items() if is_so), None)


def _hold(where: Where, meter: Meter | None, until_ms: float | None) -> HoldReason:
    if meter is None:
        return HoldReason(where, until_ms=until_ms)
    return HoldReason(where, meter.kind, meter.entity, meter.rule, until_ms)
