"""What a figure is measured with: generator, proxy, HAProxy and client, each a process."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import trustme
import yaml

from bench import traffic
from bench.client import OPEN, Job, Load, Outcome, read_outcome
from bench.processes import (
    BenchError,
    Child,
    Cores,
    listening_socket,
    python,
    start_child,
)
from bench.tls_records import tls_context
from examples.devkit.loopback import free_ports

READY_TIMEOUT_S = 30.0
ANSWER_MARGIN_S = 60.0
BROKER_PORTS = 10
POLL_S = 0.2
MAX_CONNECTIONS = 10_000
# High enough that no machine of today violates it; the sensors still work on every response.
NEVER_VIOLATED = "1000000GB"

# What its distribution is started with.
KROXYLICIOUS = "kroxylicious-start.sh"

Rule = dict[str, Any]
Entered = TypeVar("Entered")

HAPROXY_CONFIG = """\
global
    nbthread 1
    maxconn 2000
defaults
    mode tcp
    timeout connect 10s
    timeout client 10m
    timeout server 10m
"""

# A way that it works: name, configuration, what is behind the address in `bind`.
HAPROXY_LISTEN = """\
listen {name}
    {option}
    bind fd@{fd} {suffix}
    server broker {host}:{port}
"""
HAPROXY_WAYS = {"haproxy": ("", ""), "haproxy splice": ("option splice-auto", "")}


@dataclass(frozen=True, slots=True)
class Certificate:
    """What a server shows and how a client trusts it; `server_file` has its key, too."""

    ca_file: str
    server_file: str


@dataclass(frozen=True, slots=True)
class Target:
    """Something a client can connect to.

    Attributes:
        name: as printed.
        address: what the client connects to.
        child: the process on the way, None for a direct connection.

    """

    name: str
    address: traffic.Address
    child: Child | None = None

    def usage(self) -> tuple[float, float]:
        """See `Child.usage`, of the process on the way; zeros when there is none."""
        return self.child.usage() if self.child else (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy: its bootstrap listener and its admin address."""

    child: Child
    bootstrap: traffic.Address
    admin: traffic.Address
    certificate: Certificate | None = None

    def target(self) -> Target:
        """Where the proxy told a client to find the broker."""
        bootstrap = Target("proxy", self.bootstrap, self.child)
        address = _broker_behind(bootstrap, self.certificate)
        return Target("proxy", address, self.child)


@dataclass(slots=True)
class Lab:
    """Starts what a figure needs; leaving `open_lab` stops all of it."""

    work_dir: Path
    cores: Cores
    _stack: ExitStack
    _started: dict[str, int] = field(default_factory=dict)
    _client: Child | None = None

    def start_generator(self, prepare: Iterable[int] = ()) -> Target:
        """Start the stand-in broker; `prepare` lists lengths of record batches.

        It logs the arrivals of Produce requests that get no answer.
        """
        arguments = [f"--prepare={batch_bytes}" for batch_bytes in prepare]
        arguments.append(f"--arrivals={self._arrivals_path}")
        with listening_socket() as listener:
            address = listener.getsockname()
            child = self.start(
                "generator",
                python("bench.generator", f"--fd={listener.fileno()}", *arguments),
                self.cores.load,
                pass_fds=[listener.fileno()],
            )
        child.wait_line(lambda line: line == "ready", READY_TIMEOUT_S)
        return Target("direct", address, child)

    def start_proxy(
        self,
        upstream: traffic.Address,
        rules: Sequence[Rule],
        *,
        budgets: Sequence[Rule] = (),
        burst: str | None = None,
        queries: Sequence[dict[str, str]] = (),
        mode: str = "delay",
        pinned: bool = True,
        certificate: Certificate | None = None,
        usage: dict[str, str] | None = None,
    ) -> Proxy:
        """Start `quota-proxy run` before `upstream` with these quota rules.

        The clients of `queries` are followed.
        With a certificate its clients connect by TLS. `usage` is the section, None: nothing is
        metered.
        """
        bind_port, admin_port, first_port, *_, last_port = free_ports(2 + BROKER_PORTS)
        tls = {}
        if certificate is not None:
            key_pair = {"cert_file": certificate.server_file, "key_file": certificate.server_file}
            tls = {"tls": key_pair}
        config = {
            "cluster": {"bootstrap_servers": [f"{upstream[0]}:{upstream[1]}"]},
            "listeners": [
                {
                    "name": "bench",
                    "bind": f"127.0.0.1:{bind_port}",
                    "advertised_host": "127.0.0.1",
                    "broker_ports": f"{first_port}-{last_port}",
                    **tls,
                }
            ],
            "quotas": {
                "budgets": list(budgets),
                "rules": list(rules),
                **({} if burst is None else {"burst": burst}),
            },
            "queries": list(queries),
            "throttle": {"mode": mode},
            "limits": {
                "max_connections": MAX_CONNECTIONS,
                "max_connections_per_ip": MAX_CONNECTIONS,
            },
            "state": {"kind": "memory"},
            "admin": {"bind": f"127.0.0.1:{admin_port}"},
            **({} if usage is None else {"usage": usage}),
        }
        path = self.work_dir / f"quota-proxy-{bind_port}.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        child = self.start(
            "proxy",
            python("proxy", "run", "-c", str(path)),
            self.cores.tested if pinned else None,
        )
        child.wait_line(lambda line: line == "ready", READY_TIMEOUT_S)
        bind, admin = ("127.0.0.1", bind_port), ("127.0.0.1", admin_port)
        return Proxy(child, bind, admin, certificate)

    def start_haproxy(
        self, upstream: traffic.Address, certificate: Certificate | None = None
    ) -> list[Target]:
        """Start HAProxy in TCP mode with one thread: once copying, once with `splice-auto`.

        With a certificate its clients connect by TLS, and it can but copy. Returns an empty list
        when it is not installed.
        """
        program = shutil.which("haproxy", path=_path_with_sbin())
        if program is None:
            return []
        ways = HAPROXY_WAYS
        if certificate is not None:
            ways = {"haproxy": ("", f"ssl crt {certificate.server_file} ssl-min-ver TLSv1.3")}
        host, port = upstream
        with ExitStack() as listening:
            listeners = {name: listening.enter_context(listening_socket()) for name in ways}
            sections = (
                HAPROXY_LISTEN.format(
                    name=name.replace(" ", "-"),
                    option=ways[name][0],
                    fd=listener.fileno(),
                    suffix=ways[name][1],
                    host=host,
                    port=port,
                )
                for name, listener in listeners.items()
            )
            path = self.work_dir / "haproxy.cfg"
            path.write_text(HAPROXY_CONFIG + "".join(sections))
            child = self.start(
                "haproxy",
                [program, "-db", "-f", str(path)],
                self.cores.tested,
                pass_fds=[listener.fileno() for listener in listeners.values()],
            )
            targets = [
                Target(name, listener.getsockname(), child) for name, listener in listeners.items()
            ]
        for target in targets:
            _broker_behind(target, certificate)
        return targets

    def start_kroxylicious(self, upstream: traffic.Address) -> list[Target]:
        """Start Kroxylicious without filters, on the one core; none when it is not on the path."""
        program = shutil.which(KROXYLICIOUS)
        if program is None:
            return []
        bootstrap_port, first_port = free_ports(2)
        gateway = {
            "bootstrapAddress": f"127.0.0.1:{bootstrap_port}",
            "nodeStartPort": first_port,
            "nodeIdRanges": [{"name": "all", "start": 0, "end": traffic.NODE_ID}],
        }
        cluster = {
            "name": "bench",
            "targetCluster": {"bootstrapServers": f"{upstream[0]}:{upstream[1]}"},
            "gateways": [{"name": "default", "portIdentifiesNode": gateway}],
        }
        path = self.work_dir / "kroxylicious.yaml"
        path.write_text(yaml.safe_dump({"virtualClusters": [cluster]}))
        child = self.start("kroxylicious", [program, "--config", str(path)], self.cores.tested)
        bootstrap = Target("kroxylicious", ("127.0.0.1", bootstrap_port), child)
        until_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            try:
                return [replace(bootstrap, address=_broker_behind(bootstrap))]
            except BenchError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(POLL_S)

    def make_certificate(self) -> Certificate:
        """Issue a certificate by an authority of its own."""
        authority = trustme.CA()
        ca_file, server_file = self.work_dir / "ca.pem", self.work_dir / "server.pem"
        authority.cert_pem.write_to_path(str(ca_file))
        issued = authority.issue_cert("127.0.0.1")
        issued.private_key_and_cert_chain_pem.write_to_path(str(server_file))
        return Certificate(str(ca_file), str(server_file))

    def run_client(
        self,
        loads: Sequence[Load],
        duration_s: float,
        *,
        latency: bool = False,
        opened: Callable[[], object] = lambda: None,
    ) -> Outcome:
        """Run a job in the client process and return what it measured.

        `opened` is called when its connections are open.
        """
        job = Job(list(loads), duration_s, latency)
        if self._client is None:
            self._client = self.start("client", python("bench.client"), self.cores.load)
        self._client.send_line(json.dumps(asdict(job)))
        self._client.wait_line(lambda line: line == OPEN, ANSWER_MARGIN_S)
        opened()
        answer = self._client.wait_line(
            lambda line: line.startswith("{"), duration_s + ANSWER_MARGIN_S
        )
        return read_outcome(answer)

    def arrivals(self, client_id: str) -> list[tuple[float, int]]:
        """Give the Produce requests of a client at the generator: monotonic time in s, bytes."""
        lines = (line.split() for line in self._arrivals_path.read_text().splitlines())
        return [(float(time_s), int(size)) for client, time_s, size in lines if client == client_id]

    @property
    def _arrivals_path(self) -> Path:
        return self.work_dir / "arrivals"

    def enter(self, manager: AbstractContextManager[Entered]) -> Entered:
        """Enter a context that is left together with the lab, before older children stop."""
        return self._stack.enter_context(manager)

    def at_end(self, stop: Callable[[], object]) -> None:
        """Call this when the lab is left, before older children stop."""
        self._stack.callback(stop)

    def start(
        self,
        name: str,
        command: Sequence[str],
        cores: frozenset[int] | None = None,
        *,
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Start a child that this lab stops, free to use every core or just these."""
        number = self._started[name] = self._started.get(name, 0) + 1
        child = start_child(
            f"{name}-{number}", command, self.work_dir, cores=cores, pass_fds=pass_fds
        )
        return self._stack.enter_context(child)


@contextmanager
def open_lab() -> Iterator[Lab]:
    """Give a lab with a temporary directory; stop and remove everything afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="quota-proxy-bench-") as work_dir,
        ExitStack() as stack,
    ):
        yield Lab(Path(work_dir), Cores.split(), stack)


def rule(client_id: str, consumer_byte_rate: str) -> Rule:
    """Quota rule of one client id."""
    return {"client-id": client_id, "consumer_byte_rate": consumer_byte_rate}


def unviolated_rules() -> list[Rule]:
    """Rules that keep sensors for every client and never hold a response."""
    return [rule("<default>", NEVER_VIOLATED) | {"producer_byte_rate": NEVER_VIOLATED}]


def followed_rule(client_id: str) -> Rule:
    """Adaptive rule of one client id that is never violated."""
    return rule(client_id, NEVER_VIOLATED) | {"adaptive": {}}


def topic_rule(client_id: str) -> Rule:
    """Rule of one client id for all topics of the generator, that is never violated."""
    return rule(client_id, NEVER_VIOLATED) | {"topic-prefix": traffic.TOPIC_PREFIX}


def _broker_behind(target: Target, certificate: Certificate | None = None) -> traffic.Address:
    """Ask for the broker's address through a target, which shows that it serves."""
    context = tls_context(certificate.ca_file) if certificate is not None else None
    try:
        return traffic.advertised_address(target.address, "bench-discovery", context)
    except (OSError, ValueError) as error:
        log = target.child.log_tail() if target.child else ""
        raise BenchError(f"{target.name}: no broker in its Metadata: {error}{log}") from error


def _path_with_sbin() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])
