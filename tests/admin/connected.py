"""Connections as a proxy lists them, for the tests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from admin_world import CONSUMER, RULES

from proxy.quota.entities import ClientIdentity
from proxy.relay.connection_list import ConnectionRow, HoldReason

PLAIN = ConnectionRow(
    number=7,
    ip="10.0.0.7",
    port=50312,
    listener="default",
    user=None,
    client_id="etl-orders",
    node_id=2,
    broker="10.1.0.2:9092",
    began_ms=0.0,
    state="open",
    received_rate=10.0,
    sent_rate=2000.04,
    in_flight=3,
    hold=None,
)
HELD = replace(
    PLAIN,
    number=9,
    ip="10.0.0.9",
    user="Anna",
    node_id=None,
    sent_rate=None,
    received_rate=None,
    hold=HoldReason("delay_queue", CONSUMER, "client-id=etl-orders", RULES[0], 61_500.0),
)


@dataclass
class Connected:
    """The connections that a test says."""

    listed: list[ConnectionRow]
    client_rates: Mapping[ClientIdentity, float] = field(default_factory=dict)

    def rows(self) -> Iterator[ConnectionRow]:
        yield from tuple(self.listed)

    def close(self, number: int) -> ConnectionRow | None:
        for row in self.listed:
            if row.number == number:
                self.listed.remove(row)
                return row
        return None
