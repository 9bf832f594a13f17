"""A real Prometheus scrapes what is merged of members that die and are silent: no rate jumps."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from support.prometheus import watching
from support.proxy_process import HOST, PREFIX

from metrics import Instruments, MemberScrape, MergedMetrics
from proxy.admin.replies import CONTENT_TYPE

ALERTS = Path(__file__).parents[2] / "helm" / "rules" / "alerts.yaml"
MEMBERS, CLIENTS = 2, 10
MEMBER_BYTES, STEP_BYTES, STEP_S = 1_000_000, 1_000, 0.1
LIVES_S, LIVES = 3.0, 3
"""For how long the last member lives each time, and how often."""


class Machine:
    """Members that count, and what is merged of them; the members may be exchanged meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.runs = [0] * MEMBERS
        self.members = [self._member(0) for _ in self.runs]
        self.counted = 0.0
        self.silent = False
        self._merged = MergedMetrics(max_label_sets=CLIENTS)
        for number in range(MEMBERS):
            self.count(number, MEMBER_BYTES)

    def _member(self, run: int) -> tuple[int, CollectorRegistry, Instruments]:
        exposed = CollectorRegistry()
        return run, exposed, Instruments(exposed, max_label_sets=CLIENTS)

    def count(self, number: int, amount: float) -> None:
        self.members[number][2].bytes_total.of("default", "", "etl", "Fetch").inc(amount)
        self.members[number][2].broker_seconds.labels("Fetch").observe(0.01)
        self.counted += amount

    def restart(self, number: int) -> None:
        self.runs[number] += 1
        self.members[number] = self._member(self.runs[number])

    def text(self) -> bytes:
        scrapes: dict[str, MemberScrape | None] = {
            str(number): MemberScrape.read(generate_latest(exposed), run)
            for number, (run, exposed, _) in enumerate(self.members)
        }
        if self.silent:
            scrapes["0"] = None
        return self._merged.merge(scrapes)


@contextmanager
def serving(machine: Machine) -> Iterator[str]:
    """Serve the machine's metrics; give the address."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with machine.lock:
                text = machine.text()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer((HOST, 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"{HOST}:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_no_rate_jumps_while_a_member_dies_and_another_is_silent(tmp_path: Path) -> None:
    machine = Machine()
    with serving(machine) as target, watching(target, tmp_path, ALERTS) as prometheus:
        prometheus.until_scraped(time.time())
        began_s = time.time()
        for life in range(LIVES):
            until_s = began_s + (life + 1) * LIVES_S
            while time.time() < until_s:
                with machine.lock:
                    machine.count(0, STEP_BYTES)
                time.sleep(STEP_S)
            with machine.lock:
                machine.text()  # as a supervisor that asks before it starts the worker again
                machine.restart(1)
                machine.silent = life == 0
        ended_s = time.time()
        prometheus.until_scraped(ended_s)
        window = f"{int(ended_s - began_s) + 2}s"
        series = f'{PREFIX}bytes_total{{client_id="etl"}}'
        assert prometheus.value(f"resets({series}[{window}])") == 0
        assert prometheus.value(f"resets({PREFIX}broker_seconds_count[{window}])") == 0
        assert prometheus.value(series) == machine.counted
        highest = prometheus.value(f"max_over_time(rate({series}[3s])[{window}:1s])")
        # What was counted in silence comes in one scrape: a few seconds of it, not a member's all.
        assert highest < MEMBER_BYTES / 2
