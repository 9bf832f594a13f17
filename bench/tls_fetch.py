"""Figure: throughput of large Fetch responses to clients by TLS against HAProxy with TLS.

Both encrypt with one thread, by the same cipher. The client does not decrypt (see `tls_records`).
"""

import socket
from dataclasses import replace

from bench import large_fetch
from bench.comparison import CPU_PER_GB, THROUGHPUT, Contest, Goal, Line, Ring
from bench.lab import Certificate, Target, open_lab, unviolated_rules
from bench.processes import BenchError
from bench.report import Row
from bench.tls_records import tls_context

FIGURE = "tls"
CLIENT_ID = "bench-tls"
PROXY = "proxy"
GOALS = (Goal(PROXY, THROUGHPUT, 0.7), Goal(PROXY, CPU_PER_GB))
CONNECT_TIMEOUT_S = 10.0


def measure(quick: bool) -> list[Row]:
    """Run all lines in turn and give the rows."""
    rounds, duration_s = (1, 1.0) if quick else (9, 1.5)
    with open_lab() as lab:
        direct = lab.start_generator([large_fetch.RESPONSE_BYTES])
        certificate = lab.make_certificate()
        rivals = lab.start_haproxy(direct.address, certificate)
        rules = unviolated_rules()
        proxy = lab.start_proxy(direct.address, rules, certificate=certificate).target()
        ciphers = {target.name: _cipher(target, certificate) for target in (proxy, *rivals)}
        if len(set(ciphers.values())) > 1:
            raise BenchError(f"different ciphers: {ciphers}")
        lines = [Line(target.name, target, CLIENT_ID) for target in (proxy, *rivals)]
        load = replace(large_fetch.LOAD, ca_file=certificate.ca_file)
        ring = Ring(lab, direct, lines, [rival.name for rival in rivals], rounds, duration_s)
        title = f"{large_fetch.TITLE}, {ciphers[proxy.name]}"
        return list(ring.run(FIGURE, Contest(title, load, GOALS)))


def _cipher(target: Target, certificate: Certificate) -> str:
    context = tls_context(certificate.ca_file)
    with (
        socket.create_connection(target.address, CONNECT_TIMEOUT_S) as plain,
        context.wrap_socket(plain) as connection,
    ):
        cipher = connection.cipher()
    return cipher[0] if cipher else "none"
