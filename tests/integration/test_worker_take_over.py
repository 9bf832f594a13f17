"""Machines that replace one another: a successor that fails, hangs or dies costs nothing."""

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.callers import Callers
from support.forked import environment
from support.machine import MACHINE, admin_ports, kill_worker, machine_config, until_replaced
from support.operating import call, quota_proxy, running
from support.proxy_process import HOST, WAIT_S, ProxyProcess, until

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.relay.take_over import Predecessor

OVERRIDE = "/v1/quotas/client-id=etl"
WORKERS = 2


@dataclass
class Serving:
    """A machine that serves, and its settings."""

    process: ProxyProcess
    settings: dict[str, Any]
    folder: Path
    rate: int = 1000

    def set_quota(self) -> None:
        self.rate += 1
        body = {"consumer_byte_rate": self.rate}
        # Not while the group is in a round.
        until(lambda: call(self.process, "PUT", OVERRIDE, body).status == 200, "it is taken")

    def check(self, by: ProxyProcess | None = None, workers: int = WORKERS) -> None:
        """Require that every worker has the override."""
        process = by or self.process
        for number in range(workers):
            path = f"/v1/quotas?member={MACHINE}/{number}"
            until(
                lambda path=path: f": {self.rate}" in json.dumps(json.loads(process.get(path)[1])),
                f"worker {number} has it",
            )

    def answers(self) -> bool:
        """Whether a member has the admin port, where connections wait for one."""
        try:
            with urllib.request.urlopen(f"{self.process.admin_url}/healthz", timeout=1) as answer:
                return bool(answer.status == 200)
        except ConnectionError:  # closed by a member that is about to release the port
            return True
        except OSError:
            return False

    def successor(self, name: str, **changes: Any) -> ProxyProcess:
        arguments = ["--take-over", str(self.process.pid)]
        return ProxyProcess({**self.settings, **changes}, self.folder / name, arguments)

    @property
    def port(self) -> int:
        return int(self.settings["listeners"][0]["bind"].rpartition(":")[2])


Serve = Callable[..., Serving]


@pytest.fixture
def serve(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as stack:

        def start(workers: int = WORKERS) -> Serving:
            settings = machine_config(kafka.bootstrap, WORKERS)
            settings["admin"] = admin_ports(WORKERS)
            settings["workers"] = workers
            process = ProxyProcess(settings, tmp_path / "first")
            stack.callback(process.kill)
            made = Serving(process.start(), settings, tmp_path)
            until(lambda: process.get("/readyz")[0] == 200, "it is ready")
            made.set_quota()
            made.check(workers=workers)
            return made

        yield start


def none_refused(callers: Callers) -> None:
    assert callers.outcomes["answered"] > 0
    assert set(callers.outcomes) <= {"answered", "closed"}, callers.outcomes


def test_a_successor_gives_up_when_it_has_the_state(serve: Serve) -> None:
    """Then workers write again, also those that were started meanwhile; and the next one has it."""
    serving = serve()
    with ExitStack() as stack:
        callers = stack.enter_context(Callers(serving.port))
        with closing(Predecessor(serving.process.pid)) as predecessor:
            assert predecessor.release()
            until(lambda: not serving.answers(), "the admin port is released")
        until(serving.answers, "the admin port is open again")
        serving.set_quota()
        serving.check()
        callers_end = stack.pop_all()
    with running(serving.successor("next")) as successor, callers_end:
        assert serving.process.wait() == 0
        serving.check(successor)
    none_refused(callers)


def test_workers_begin_anew_after_a_take_over_that_failed(serve: Serve) -> None:
    serving = serve()
    with closing(Predecessor(serving.process.pid)) as predecessor:
        assert predecessor.release()
        until(lambda: not serving.answers(), "the admin port is released")
    until(serving.answers, "the admin port is open again")
    for number in range(WORKERS):
        until_replaced(serving.process, number, kill_worker(serving.process, number))
    serving.check()
    serving.set_quota()
    serving.check()


def test_a_worker_dies_while_a_successor_has_the_state(serve: Serve) -> None:
    serving = serve()
    with closing(Predecessor(serving.process.pid)) as predecessor:
        assert predecessor.release()
        until(lambda: not serving.answers(), "the admin port is released")
        kill_worker(serving.process, 1)
        until(lambda: serving.process.log("a worker has ended, starting it again"), "it has ended")
    until(serving.answers, "the admin port is open again")
    until(lambda: serving.process.get("/readyz")[0] == 200, "all serve")
    serving.set_quota()
    serving.check()
    with running(serving.successor("next")) as successor:
        assert serving.process.wait() == 0
        serving.check(successor)


def test_a_successor_that_fails_before(serve: Serve) -> None:
    serving = serve()
    file = serving.folder / "failing.yaml"
    other = {"cluster": {"bootstrap_servers": [f"{HOST}:{free_ports(1)[0]}"]}}
    file.write_text(yaml.safe_dump({**serving.settings, **other}))
    with Callers(serving.port) as callers:
        code, _, errors = quota_proxy("run", "-c", file, "--take-over", serving.process.pid)
    none_refused(callers)
    assert (code, other["cluster"]["bootstrap_servers"][0] in errors) == (1, True)
    serving.set_quota()
    serving.check()


HANGING = """
import sys, time
from proxy import cli, hot_restart
from proxy.launcher import launcher
hot_restart.SERVE_TIMEOUT_S = 3
async def begin(self, worker):
    time.sleep(600)
launcher.Launcher._begin = begin
sys.exit(cli.main())
"""


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_a_successor_that_hangs(serve: Serve, ends: str) -> None:
    serving = serve()
    run = ["run", "-c", str(serving.process.config_file), "--take-over", str(serving.process.pid)]
    command = [sys.executable, "-c", HANGING, *run]
    with (
        Callers(serving.port) as callers,
        subprocess.Popen(command, stderr=subprocess.PIPE, env=environment()) as successor,
    ):
        try:
            until(lambda: not serving.answers(), "the admin port is released")
            if ends == "killed":
                successor.send_signal(signal.SIGKILL)
            successor.wait(WAIT_S)
        finally:
            successor.kill()
        until(serving.answers, "the admin port is open again")
    assert "ConnectionRefusedError" not in callers.outcomes
    serving.set_quota()
    serving.check()
    with running(serving.successor("next")) as after:
        assert serving.process.wait() == 0
        serving.check(after)


def test_the_state_goes_on_with_another_number_of_workers(serve: Serve) -> None:
    serving = serve(1)
    before = serving.process
    for number, workers in enumerate((2, 1)):
        after = serving.successor(f"next-{number}", workers=workers)
        try:
            with Callers(serving.port) as callers:
                after.start()
                assert before.wait() == 0
                before.check_log()
                serving.process = before = after
                serving.check(workers=workers)
                serving.set_quota()
                serving.check(workers=workers)
            none_refused(callers)
        except BaseException:
            after.kill()
            raise
    before.stop()
