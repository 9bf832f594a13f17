"""Figure: how well a bound is held by Kafka's own quota, and by the proxy in both modes.

One real broker. Some client ids have their `consumer_byte_rate` there, as `kafka-configs` sets it,
and read directly; the others have none there and the same bound in a proxy. The reader is the same
for all. Cells of low bounds run side by side, those of a high one after another. Beside the rate
stands the most that came within one second, once the start is over: Kafka lets a client read all
that a window allows, and then nothing until the window has moved on.
"""

import socket
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from kafka.protocol.admin import AlterClientQuotasRequest, AlterClientQuotasResponse

from bench import topics, traffic
from bench.bound import KILOBYTE, MEGABYTE, MIB, TOLERANCE, size_text
from bench.client import Load, Served
from bench.lab import Lab, open_lab, rule
from bench.processes import BenchError
from bench.rates import most_within, per_second, rate_between
from bench.report import Row, Verdict
from examples.devkit.broker import EmbeddedBroker

FIGURE = "own quota"
OWN, DELAY, MUTE = "Kafka's own quota", "delay", "mute"
WAYS = (OWN, DELAY, MUTE)
CONNECTIONS = (1, 8, 64)
SLOW_BOUNDS = (256 * KILOBYTE, 2500 * KILOBYTE, 10 * MEGABYTE)
FAST_BOUND, FAST_CONNECTIONS = 200 * MEGABYTE, 8
QUICK_BOUND = 2500 * KILOBYTE
FETCH_BYTES = MIB
# The topic is asked for by name.
FETCH_VERSION = 12
# Of the producer that fills the topic: Kafka's default.
BATCH_BYTES = 16 << 10
VALUE_BYTES = 1000
TOPIC_BYTES = 4 * MIB
FULL_WINDOW_S, FAST_WINDOW_S, QUICK_WINDOW_S = (25.0, 90.0), (15.0, 45.0), (14.0, 20.0)
TAIL_S = 3.0
PEAK_S = 1.0
QUOTAS_VERSION = 1
CORRELATION_ID = 1
SETTER = "bench-quotas"
ANSWER_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One client id: who holds it to which bound, and its connections."""

    way: str
    bound: int
    connections: int

    @property
    def client_id(self) -> str:
        """Client id that only this cell uses."""
        return f"own-quota-{WAYS.index(self.way)}-{self.bound}-{self.connections}"


@dataclass(frozen=True, slots=True)
class Held:
    """How one client was held.

    Attributes:
        error: share by which the rate was above (or below) the bound.
        peak: most bytes in any PEAK_S, in times of what the bound allows in that time.
        bytes_per_second: of the whole run.

    """

    error: float
    peak: float
    bytes_per_second: list[int]


def measure(quick: bool) -> list[Row]:
    """Run all cells and give a row for each bound and number of connections."""
    slow = [*product(WAYS, (QUICK_BOUND,) if quick else SLOW_BOUNDS, CONNECTIONS)]
    rounds = [([Cell(*each) for each in slow], QUICK_WINDOW_S if quick else FULL_WINDOW_S)]
    if not quick:
        fast = (Cell(way, FAST_BOUND, FAST_CONNECTIONS) for way in WAYS)
        rounds += [([cell], FAST_WINDOW_S) for cell in fast]
    cells = [cell for together, _ in rounds for cell in together]
    found: dict[Cell, Held] = {}
    with open_lab() as lab:
        broker = lab.enter(EmbeddedBroker(lab.work_dir / "broker"))
        topic = traffic.topic_name(BATCH_BYTES)
        topics.create(broker.bootstrap, topic, 1)
        settings = {"batch.size": BATCH_BYTES}
        topics.fill(
            broker.bootstrap, topic, 1, bytes(VALUE_BYTES), TOPIC_BYTES // VALUE_BYTES, settings
        )
        direct = "127.0.0.1", broker.port
        _set_quotas(direct, [cell for cell in cells if cell.way == OWN])
        rules = [rule(cell.client_id, str(cell.bound)) for cell in cells]
        addresses = {OWN: direct} | {
            mode: lab.start_proxy(direct, rules, mode=mode, pinned=False).target().address
            for mode in (DELAY, MUTE)
        }
        for together, window_s in rounds:
            found |= _run(lab, together, addresses, window_s)
    return [
        _row(bound, connections, {way: found[Cell(way, bound, connections)] for way in WAYS})
        for bound, connections in dict.fromkeys((cell.bound, cell.connections) for cell in cells)
    ]


def _run(
    lab: Lab,
    cells: Sequence[Cell],
    addresses: dict[str, traffic.Address],
    window_s: tuple[float, float],
) -> dict[Cell, Held]:
    """Return how each cell was held."""
    loads = [
        Load(
            cell.client_id,
            *addresses[cell.way],
            cell.connections,
            FETCH_BYTES,
            FETCH_VERSION,
            batch_bytes=BATCH_BYTES,
        )
        for cell in cells
    ]
    outcome = lab.run_client(loads, window_s[1] + TAIL_S)
    return {
        cell: _held(served, cell.bound, window_s)
        for cell, served in zip(cells, outcome.served, strict=True)
    }


def _held(served: Served, bound: int, window_s: tuple[float, float]) -> Held:
    # Whom the broker holds gets empty responses, which are no traffic.
    filled = [
        (time_s, size)
        for time_s, size in zip(served.completed_s, served.frame_bytes, strict=True)
        if size >= VALUE_BYTES
    ]
    times, sizes = [time_s for time_s, _ in filled], [size for _, size in filled]
    first = bisect_left(times, window_s[0])
    return Held(
        error=rate_between(times, sizes, *window_s).interpolated / bound - 1,
        peak=most_within(times[first:], sizes[first:], PEAK_S) / (bound * PEAK_S),
        bytes_per_second=per_second(times, sizes),
    )


def _set_quotas(address: traffic.Address, cells: Sequence[Cell]) -> None:
    """Let the broker itself hold these clients; raises BenchError when it does not want to."""
    entry = AlterClientQuotasRequest.EntryData
    entries = [
        entry(
            entity=[entry.EntityData(entity_type="client-id", entity_name=cell.client_id)],
            ops=[entry.OpData(key="consumer_byte_rate", value=float(cell.bound), remove=False)],
        )
        for cell in cells
    ]
    request = AlterClientQuotasRequest[QUOTAS_VERSION](entries=entries, validate_only=False)
    request.with_header(correlation_id=CORRELATION_ID, client_id=SETTER)
    with socket.create_connection(address, ANSWER_TIMEOUT_S) as connection:
        connection.sendall(request.encode(header=True, framed=True))
        frame = traffic.receive_frame(connection)
    answer = AlterClientQuotasResponse.decode(
        frame, version=QUOTAS_VERSION, header=True, framed=True
    )
    for answered in answer.entries:
        if answered.error_code:
            raise BenchError(f"the broker takes no quota: {answered.error_message}")


def _row(bound: int, connections: int, found: dict[str, Held]) -> Row:
    """Compare the ways; what Kafka itself does decides nothing."""
    is_met = all(abs(held.error) <= TOLERANCE for way, held in found.items() if way != OWN)
    plural = "s" if connections > 1 else ""
    return Row(
        FIGURE,
        f"{size_text(bound)}/s, {connections} connection{plural}, real broker",
        f"proxy within {TOLERANCE:.0%}",
        "; ".join(
            f"{way} {held.error:+.2%}, {held.peak:.1f}x in {PEAK_S:g} s"
            for way, held in found.items()
        ),
        Verdict.of(is_met),
        {
            "bound_bytes_per_s": bound,
            "connections": connections,
            "error": {way: held.error for way, held in found.items()},
            "peak_of_bound": {way: held.peak for way, held in found.items()},
            "bytes_in_each_second": {way: held.bytes_per_second for way, held in found.items()},
        },
    )
