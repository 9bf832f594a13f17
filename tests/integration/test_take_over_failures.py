"""A take-over that fails, or whose successor is killed: the old proxy serves on with all it has."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import yaml
from support.clients import Access, Librdkafka
from support.forked import ForkedCommand, environment
from support.operating import call, quota_proxy, running
from support.proxy_process import HOST, LISTENER, WAIT_S, ProxyProcess, config, until
from support.raw import RawClient, api_versions

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.relay.take_over import Predecessor
from proxy.state import SqliteStore

OVERRIDE = "/v1/quotas/client-id=etl"
PAGE_BYTES = 4096
RECORDS, RECORD_BYTES = 200, 1_000
READ_LIMIT_S = 300
CONNECTIONS = 20


@dataclass
class Serving:
    """A proxy that a client is connected to, and what its successor is to have."""

    process: ProxyProcess
    settings: dict[str, Any]
    client: RawClient
    folder: Path
    stack: ExitStack
    rate: int = field(default=1000)

    def set_quota(self) -> None:
        self.rate += 1
        body = {"consumer_byte_rate": self.rate}
        assert call(self.process, "PUT", OVERRIDE, body).status == 200

    def check(self, by: ProxyProcess | None = None) -> None:
        """Require that it serves: who is connected, who connects, operators."""
        process = by or self.process
        if by is None:
            assert self.client.ask(api_versions(3)).error_code == 0
        self.check_new_clients()
        (override,) = [
            entry
            for entry in call(process, "GET", "/v1/quotas").document["quotas"]
            if entry["source"] == "override"
        ]
        assert override["bounds"] == {"consumer_byte_rate": self.rate}

    def check_new_clients(self) -> None:
        for _ in range(CONNECTIONS):
            with RawClient(self.settings["listeners"][0]["bind"]) as client:
                assert client.ask(api_versions(3)).error_code == 0

    def successor(self, settings: dict[str, Any], name: str = "successor") -> ProxyProcess:
        arguments = ["--take-over", str(self.process.pid)]
        process = ProxyProcess(settings, self.folder / name, arguments)
        self.stack.callback(process.kill)
        return process

    def fails(self, settings: dict[str, Any]) -> str:
        """Return what a successor with this configuration says, which must not get through."""
        file = self.folder / "failing.yaml"
        file.write_text(yaml.safe_dump(settings))
        arguments = ("run", "-c", file, "--take-over", self.process.pid)
        code, output, errors = quota_proxy(*arguments)
        assert (code, output) == (1, "")
        until(lambda: self.process.log("not replaced, serving on: the successor has given up"), "")
        assert not self.process.log("draining")
        return errors


Serve = Callable[[str], Serving]


@pytest.fixture
def serving_with(
    kafka: EmbeddedBroker, tmp_path: Path, topic_names: Iterator[str]
) -> Iterator[Serve]:
    """`serving_with(kind)` starts a proxy with that kind of state."""
    bind_port, first, last, admin_port = free_ports(4)
    ports = {"bind": f"{HOST}:{bind_port}", "broker_ports": f"{first}-{last}"}
    states = {
        "sqlite": {"kind": "sqlite", "path": str(tmp_path / "state.db")},
        "memory": {"kind": "memory"},
        "kafka": {"kind": "kafka", "topic": f"state-{next(topic_names)}"},
    }
    with ExitStack() as stack:

        def serve(kind: str) -> Serving:
            settings = config(
                kafka.bootstrap,
                listeners=[{**LISTENER, **ports}],
                state=states[kind],
                admin_port=admin_port,
            )
            process = ProxyProcess(settings, tmp_path / "first")
            stack.callback(process.kill)
            process.start()
            client = stack.enter_context(RawClient(process.bootstrap))
            client.ask(api_versions(3))
            made = Serving(process, settings, client, tmp_path, stack)
            made.set_quota()
            made.check()
            return made

        yield serve


@pytest.fixture
def serving(serving_with: Serve) -> Serving:
    return serving_with("sqlite")


Spoil = Callable[[Serving], dict[str, Any]]


def another_state(serving: Serving, content: bytes | None = None) -> dict[str, Any]:
    path = serving.folder / "other.db"
    if content is not None:
        path.write_bytes(content)
    return serving.settings | {"state": {"kind": "sqlite", "path": str(path)}}


def damaged(serving: Serving) -> dict[str, Any]:
    path = serving.folder / "whole.db"
    with closing(SqliteStore(path)) as store:
        for number in range(1000):
            store.put(f"a/{number}", "x" * 100)
    content = bytearray(path.read_bytes())
    content[PAGE_BYTES * 2 : PAGE_BYTES * 3] = b"\xa5" * PAGE_BYTES
    return another_state(serving, bytes(content))


def damaged_under_the_old_one(serving: Serving) -> dict[str, Any]:
    """What it has read stays with it."""
    path = serving.folder / "state.db"
    with path.open("r+b") as file:
        file.write(b"\xa5" * 100)
    path.with_name("state.db-wal").write_bytes(b"")
    return serving.settings


def override_of_a_newer_version(serving: Serving) -> dict[str, Any]:
    settings = another_state(serving)
    with closing(SqliteStore(Path(settings["state"]["path"]))) as store:
        store.put("quotas/client-id=x", {"new": 1}, version=2)
    return settings


def state_that_another_process_has(serving: Serving) -> dict[str, Any]:
    settings = another_state(serving)
    serving.stack.enter_context(closing(SqliteStore(Path(settings["state"]["path"]))))
    return settings


def silent_port(stack: ExitStack) -> int:
    """A port that takes connections, up to a few, and never answers."""
    sock = stack.enter_context(socket.create_server((HOST, 0)))
    return int(sock.getsockname()[1])


def kafka_that_does_not_answer(serving: Serving, timeout: str = "500ms") -> dict[str, Any]:
    servers = [f"{HOST}:{silent_port(serving.stack)}"]
    return serving.settings | {
        "cluster": {"bootstrap_servers": servers},
        "state": {"kind": "kafka"},
        "limits": {"connect_timeout": timeout},
    }


def taken(serving: Serving, *, shared: bool = False) -> str:
    sock = serving.stack.enter_context(socket.socket())
    if shared:  # as a proxy does, and nobody else
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind((HOST, 0))
    sock.listen()
    return f"{HOST}:{sock.getsockname()[1]}"


def admin_port_taken(serving: Serving) -> dict[str, Any]:
    return serving.settings | {"admin": {"bind": taken(serving)}}


def admin_port_of_another_proxy(serving: Serving) -> dict[str, Any]:
    return serving.settings | {"admin": {"bind": taken(serving, shared=True)}}


def listener_of_another_proxy(serving: Serving) -> dict[str, Any]:
    (listener,) = serving.settings["listeners"]
    return serving.settings | {"listeners": [{**listener, "bind": taken(serving, shared=True)}]}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (damaged, "other.db is damaged"),
        (damaged_under_the_old_one, "state.db is not a state file"),
        (override_of_a_newer_version, "it has form 2, this version of quota-proxy knows 1"),
        (state_that_another_process_has, "other.db is in use by process"),
        (kafka_that_does_not_answer, "the state in topic quota-proxy-state cannot be opened"),
        (admin_port_taken, "admin.bind: 127.0.0.1:"),
        (admin_port_of_another_proxy, "admin.bind: 127.0.0.1:"),
        (listener_of_another_proxy, "listener 'default': 127.0.0.1:"),
    ],
)
def test_the_old_one_serves_on(serving: Serving, spoil: Spoil, said: str) -> None:
    errors = serving.fails(spoil(serving))
    assert said in errors
    assert "fix: " in errors
    serving.check()
    if spoil is damaged_under_the_old_one:
        return
    serving.set_quota()
    with running(serving.successor(serving.settings)) as successor:
        assert serving.process.wait() == 0
        serving.check(successor)


def test_a_bad_configuration_does_not_even_ask(serving: Serving) -> None:
    file = serving.folder / "bad.yaml"
    file.write_text(yaml.safe_dump(serving.settings | {"speed": 1}))
    code, _, errors = quota_proxy("run", "-c", file, "--take-over", serving.process.pid)
    assert (code, "speed" in errors) == (2, True)
    assert not serving.process.log("to be replaced")
    serving.check()


def is_refused(serving: Serving) -> bool:
    try:
        serving.process.get("/healthz")
    except OSError:
        return True
    return False


@pytest.mark.parametrize("kind", ["sqlite", "memory", "kafka"])
def test_a_successor_gives_up_when_it_has_the_state(serving_with: Serve, kind: str) -> None:
    """Clients are served all the while; then the old one has its state and admin port again."""
    serving = serving_with(kind)
    for _ in range(2):
        with closing(Predecessor(serving.process.pid)) as predecessor:
            assert predecessor.release()
            until(lambda: is_refused(serving), "the admin port is released")
            assert serving.client.ask(api_versions(3)).error_code == 0
            if kind == "sqlite":
                with closing(SqliteStore(serving.folder / "state.db")) as state:
                    assert len(state.items("quotas/")) == 1
        until(lambda: not is_refused(serving), "the admin port is open again")
        serving.check()
        serving.set_quota()
        serving.check()
    with running(serving.successor(serving.settings)) as successor:
        assert serving.process.wait() == 0
        if kind != "memory":
            serving.check(successor)


def test_an_override_ends_while_a_successor_has_the_state(serving: Serving) -> None:
    """Nothing can be written then, which must not end the proxy."""
    body = {"consumer_byte_rate": 1, "until": "3s"}
    assert call(serving.process, "PUT", OVERRIDE, body).status == 200
    with closing(Predecessor(serving.process.pid)) as predecessor:
        assert predecessor.release()
        until(lambda: is_refused(serving), "the admin port is released")
        text = "ended overrides or pauses are still in the state"
        until(lambda: serving.process.log(text), "the override has ended")
        serving.check_new_clients()
    until(lambda: not is_refused(serving), "the admin port is open again")
    serving.set_quota()
    serving.check()


SUCCESSOR = """
import socket, sys
from pathlib import Path
from proxy.relay.take_over import Predecessor
from proxy.state import SqliteStore

predecessor = Predecessor(int(sys.argv[1]))
assert predecessor.release()
state = SqliteStore(Path(sys.argv[2]))
admin = socket.create_server(("127.0.0.1", int(sys.argv[3])), reuse_port=True)
print("has all", flush=True)
sys.stdin.readline()
"""


def test_a_successor_is_killed_when_it_has_the_state(serving: Serving) -> None:
    state, admin = serving.folder / "state.db", serving.settings["admin"]["bind"]
    arguments = [str(serving.process.pid), str(state), admin.rpartition(":")[2]]
    command = [sys.executable, "-c", SUCCESSOR, *arguments]
    for _ in range(3):
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        ) as successor:
            assert successor.stdout is not None
            assert successor.stdout.readline() == b"has all\n"
            successor.send_signal(signal.SIGKILL)
        until(lambda: not is_refused(serving), "the admin port is open again")
        serving.check()
        serving.set_quota()
    assert not serving.process.log("state not opened again, nothing is kept")
    serving.process.stop()
    serving.process.start()
    serving.check(serving.process)


HANGING = """
import sys, time
from proxy import cli, hot_restart, member
hot_restart.SERVE_TIMEOUT_S = int(sys.argv.pop(1))
member.AuditLog = lambda _: time.sleep(600)
sys.exit(cli.main())
"""
HANGS_AFTER_S = 3
HANGS = "the successor hangs: connections come here again, admin port and state when it ends"


@contextmanager
def hanging(serving: Serving) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a successor that has state and ports, and never serves."""
    file = serving.folder / "hanging.yaml"
    file.write_text(yaml.safe_dump(serving.settings))
    run = ["run", "-c", str(file), "--take-over", str(serving.process.pid)]
    command = [sys.executable, "-c", HANGING, str(HANGS_AFTER_S), *run]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) as successor:
        try:
            until(lambda: is_refused(serving), "the admin port is released")
            yield successor
        finally:
            successor.kill()


def test_a_successor_that_hangs_is_ended(serving: Serving) -> None:
    """It says where it hung, and the old one has back what it had released."""
    with hanging(serving) as successor:
        assert serving.client.ask(api_versions(3)).error_code == 0
        assert successor.wait(WAIT_S) == 1
        assert successor.stderr is not None
        assert b"Timeout" in (said := successor.stderr.read())
        assert b"in start" in said
    until(lambda: not is_refused(serving), "the admin port is open again")
    serving.check()
    serving.set_quota()


def test_one_that_cannot_even_end_loses_new_connections(serving: Serving) -> None:
    with hanging(serving) as successor:
        successor.send_signal(signal.SIGSTOP)
        (line,) = until(lambda: serving.process.log(HANGS), "it is noticed")
        assert line["fix"] == f"end process {successor.pid}"
        assert serving.client.ask(api_versions(3)).error_code == 0
        serving.check_new_clients()
        code, _, errors = quota_proxy(
            "run", "-c", serving.process.config_file, "--take-over", serving.process.pid
        )
        assert code == 2
        assert f"is being replaced by process {successor.pid} now" in errors
    until(lambda: not is_refused(serving), "the admin port is open again")
    serving.check()
    serving.set_quota()
    with running(serving.successor(serving.settings)) as next_one:
        assert serving.process.wait() == 0
        serving.check(next_one)


TOLD_TO_STOP = """
import os, signal, sys, time
from proxy import cli, member

def open_and_stop(*arguments):
    store = open_store(*arguments)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # in a thread
    return store

open_store, member.open_store = member.open_store, open_and_stop
sys.exit(cli.main())
"""


def test_a_successor_is_told_to_stop_when_it_has_the_state(serving: Serving) -> None:
    """Then there must not be two that stop."""
    run = ["run", "-c", str(serving.process.config_file), "--take-over", str(serving.process.pid)]
    command = [sys.executable, "-c", TOLD_TO_STOP, *run]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) as successor:
        _, errors = successor.communicate(timeout=WAIT_S)
    assert successor.returncode == 1
    assert b"was told to stop before it took over" in errors
    until(lambda: not is_refused(serving), "the admin port is open again")
    serving.check()
    serving.set_quota()


def test_a_successor_gives_up_and_the_state_is_gone(serving: Serving) -> None:
    """What it had in memory is kept in the new file."""
    with closing(Predecessor(serving.process.pid)) as predecessor:
        assert predecessor.release()
        until(lambda: is_refused(serving), "the admin port is released")
        until(lambda: not (serving.folder / "state.db-wal").exists(), "the state is released")
        (serving.folder / "state.db").unlink()
    until(lambda: not is_refused(serving), "the admin port is open again")
    serving.check()
    with running(serving.successor(serving.settings)) as successor:
        assert serving.process.wait() == 0
        serving.check(successor)


@contextmanager
def started(file: Path, pid: int) -> Iterator[ForkedCommand]:
    """Start a successor that may never be ready."""
    with TemporaryFile() as output:
        arguments = ["run", "-c", str(file), "--take-over", str(pid)]
        command = ForkedCommand(arguments, output.fileno(), output.fileno())
        try:
            yield command
        finally:
            command.kill()


def test_a_successor_is_killed_while_it_looks_at_the_state(serving: Serving) -> None:
    file = serving.folder / "waiting.yaml"
    file.write_text(yaml.safe_dump(kafka_that_does_not_answer(serving, f"{WAIT_S}s")))
    with started(file, serving.process.pid) as successor:
        until(lambda: serving.process.log("to be replaced"), "it has come")
        serving.check()
        arguments = ("run", "-c", file, "--take-over", serving.process.pid)
        code, _, errors = quota_proxy(*arguments)
        assert code == 2
        assert f"is being replaced by process {successor.pid} now" in errors
        successor.send_signal(signal.SIGKILL)
        until(
            lambda: serving.process.log("not replaced, serving on: the successor has given up"), ""
        )
    serving.check()
    serving.set_quota()
    with running(serving.successor(serving.settings)) as next_one:
        assert serving.process.wait() == 0
        serving.check(next_one)


@pytest.mark.slow
def test_successors_are_killed_at_any_moment(
    serving: Serving, topic: Callable[..., str], fill: Callable[..., None]
) -> None:
    """Until it serves the old one does, with all that it had; what is started then has it, too.

    A consumer that was there before, and stays, reads what comes afterwards.
    """
    name = topic()
    fill(name, RECORDS, RECORD_BYTES)
    file = serving.folder / "same.yaml"
    file.write_text(yaml.safe_dump(serving.settings))
    (listener,) = serving.settings["listeners"]
    joined, over = threading.Event(), threading.Event()

    def halfway() -> None:
        joined.set()
        assert over.wait(READ_LIMIT_S)

    with ThreadPoolExecutor() as pool:
        access, halt = Access(listener["bind"], "reader"), (RECORDS, halfway)
        # By default its main thread stops for good now and then: see docs/take-over.md.
        client = Librdkafka({"metadata.recovery.strategy": "none"})
        read = pool.submit(client.consume, access, name, 2 * RECORDS, at=halt)
        assert joined.wait(WAIT_S)
        try:
            for moment_s in (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3):
                with started(file, serving.process.pid) as successor:
                    time.sleep(moment_s)
                    successor.send_signal(signal.SIGKILL)
                    successor.wait(WAIT_S)
                if serving.process.log("replaced"):
                    assert serving.process.wait() == 0
                    serving.process.start()
                until(lambda: not is_refused(serving), "the admin port is open again")
                serving.check(serving.process)
                serving.set_quota()
        finally:
            fill(name, RECORDS, RECORD_BYTES)
            over.set()
        assert read.result(WAIT_S).count == 2 * RECORDS
