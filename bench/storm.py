"""Figure: how long a busy client waits while thousands of others connect at once.

That is what a restart of a cluster's clients looks like. Each of them connects, sends ApiVersions
and Fetch, and stays. The busy client asks at fixed times, and what it waits counts from these, so
that a long wait counts for all requests that it delays. It has a stand-in broker to itself; the
others have another one. Beside the proxy the same is measured without one: what the machine itself
costs is in both.
"""

import json
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench import traffic
from bench.lab import Lab, Target, open_lab, unviolated_rules
from bench.processes import python, raise_file_limit
from bench.report import Row, Verdict

FIGURE = "storm"
CLIENT_ID = "bench-busy"
VERSION = 12
FULL_CLIENTS, QUICK_CLIENTS = 9_000, 500
OTHER_FILES = 200
EVERY_S = 0.02
QUIET_S = 2.0
START_TIMEOUT_S = 60.0
STORM_TIMEOUT_S = 90.0
CONNECT_TIMEOUT_S = 30.0
TARGET_MS = 50.0
MS = 1000.0


@dataclass(frozen=True, slots=True)
class Waits:
    """What a busy client waited, in milliseconds, and how the storm went."""

    quiet: list[float]
    during: list[float]
    answered: int
    took_s: float


def measure(quick: bool) -> list[Row]:
    """Let clients storm a stand-in broker, without and with the proxy."""
    rounds = 1 if quick else 3
    count = min(QUICK_CLIENTS if quick else FULL_CLIENTS, (raise_file_limit() - OTHER_FILES) // 2)
    direct: list[Waits] = []
    through: list[Waits] = []
    for _ in range(rounds):
        for waits, has_proxy in ((direct, False), (through, True)):
            with open_lab() as lab:
                waits.append(_storm(lab, count, has_proxy=has_proxy))
    return [
        _row(f"{count:,} clients connect at once", through, count, is_judged=True),
        _row("the same without the proxy", direct, count, is_judged=False),
    ]


def _storm(lab: Lab, count: int, *, has_proxy: bool) -> Waits:
    target: Target = lab.start_generator([traffic.small_batch_bytes()])
    host, port = lab.start_storm_broker(target.address).address
    if has_proxy:
        proxy = lab.start_proxy((host, port), unviolated_rules())
        target, (host, port) = proxy.target(), proxy.bootstrap
    storm = lab.start_helper(
        "storm",
        python(
            "bench.storm_clients", host, str(port), f"--connections={count}", f"--version={VERSION}"
        ),
    )
    storm.wait_line(lambda line: line == "ready", START_TIMEOUT_S)
    with socket.create_connection(target.address, CONNECT_TIMEOUT_S) as busy:
        busy.sendall(traffic.api_versions_request(CLIENT_ID))
        traffic.receive_frame(busy)
        quiet_until_s = time.monotonic() + QUIET_S
        quiet = _ask(busy, lambda: time.monotonic() >= quiet_until_s)
        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(
                storm.wait_line, lambda line: line.startswith("{"), STORM_TIMEOUT_S
            )
            storm.send_line("go")
            during = _ask(busy, outcome.done)
        said = json.loads(outcome.result())
    return Waits(quiet, during, said["answered"], said["took_s"])


def _ask(busy: socket.socket, is_over: Callable[[], bool]) -> list[float]:
    """Ask at fixed times until it is over; give what each answer took from its time on."""
    size = traffic.small_batch_bytes()
    request = traffic.fetch_request(VERSION, CLIENT_ID, size, size)
    waits = []
    due_s = time.monotonic()
    while not is_over():
        time.sleep(max(due_s - time.monotonic(), 0.0))
        busy.sendall(request)
        traffic.receive_frame(busy)
        waits.append((time.monotonic() - due_s) * MS)
        due_s += EVERY_S
    return waits


def _row(what: str, all_waits: list[Waits], count: int, *, is_judged: bool) -> Row:
    p99 = statistics.median(_p99(waits.during) for waits in all_waits)
    quiet = statistics.median(_p99(waits.quiet) for waits in all_waits)
    longest = max(max(waits.during) for waits in all_waits)
    took_s = statistics.median(waits.took_s for waits in all_waits)
    is_whole = all(waits.answered == count for waits in all_waits)
    verdict = Verdict.of(p99 <= TARGET_MS and is_whole) if is_judged else Verdict.INFO
    return Row(
        FIGURE,
        f"{what}: p99 of a busy client",
        f"at most {TARGET_MS:.0f} ms" if is_judged else "",
        f"{p99:.1f} ms, at most {longest:.0f} ms (quiet p99 {quiet:.1f} ms; all in {took_s:.1f} s)",
        verdict,
        {
            "p99_ms": [_p99(waits.during) for waits in all_waits],
            "quiet_p99_ms": [_p99(waits.quiet) for waits in all_waits],
            "answered": [waits.answered for waits in all_waits],
            "took_s": [waits.took_s for waits in all_waits],
        },
    )


def _p99(waits: list[float]) -> float:
    return statistics.quantiles(waits, n=100, method="inclusive")[-1]
