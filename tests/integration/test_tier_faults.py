"""What goes wrong with machines of a tier costs their clients a pause, and no record."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka.admin import AdminClient, NewTopic
from support.cut_way import CutWay, cut_way
from support.forked import environment
from support.machine import admin_ports, is_gone, kill_worker, until_replaced, worker_pids
from support.operating import call, quota_proxy, write
from support.proxy_process import HOST, until
from support.steady import Steady
from support.tier import (
    TierMachine,
    client_of,
    owner_of,
    report_to,
    tier_config,
    until_shared,
)

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports
from proxy.relay.take_over import Predecessor

SHARE = 60
WORKERS = 2
CRASHES = 6
LIMIT_S = 60.0
ANSWER_LIMIT_S = 8.0
DRAIN_S = 2.0
SOON_S = 20.0
"""For a client to go elsewhere, and some rounds of the group."""
END_LIMIT_S = 25.0
NOWHERE = "127.0.0.9"
"""Nobody listens there, as all bind to another address."""
OVERRIDE = "/v1/quotas/client-id=bounded"
PLAIN_PROTOCOL = "PLAINTEXT:PLAINTEXT,WAY:PLAINTEXT,CONTROLLER:PLAINTEXT"


@dataclass
class Tier:
    """Three machines; the last one reaches Kafka by a way that can be cut."""

    broker: EmbeddedBroker
    way: CutWay
    machines: list[TierMachine]
    folder: Path
    numbers: Iterator[int] = field(default_factory=count)

    @property
    def bootstrap(self) -> str:
        return ",".join(machine.bootstrap for machine in self.machines)

    def topic(self) -> str:
        name = f"faults-{next(self.numbers)}"
        with AdminClient({"bootstrap.servers": self.broker.bootstrap}) as admin:
            admin.create_topics([NewTopic(name, 1)])[name].result(30)
        return name

    def client_of(
        self, machine: TierMachine, prefix: str, timeout_s: float = ANSWER_LIMIT_S
    ) -> Steady:
        """Make a client whose owner is on a machine."""
        client_id = client_of(self.machines, machine, prefix)
        return Steady(self.bootstrap, client_id, self.topic(), timeout_s)

    def until_shared(self) -> None:
        until_shared(*self.machines, least=SHARE)
        for machine in self.machines:
            until(lambda machine=machine: machine.get("/readyz")[0] == 200, machine.name)


def broker_with_a_way(folder: Path) -> tuple[EmbeddedBroker, int, int]:
    """Make a broker, with a second listener that is known by another port than its own."""
    port, second, known_as = free_ports(3)
    broker = EmbeddedBroker(folder, port)
    inner = broker.settings.quorum.port
    properties = {
        "listeners": f"PLAINTEXT://{HOST}:{port},WAY://{HOST}:{second},CONTROLLER://{HOST}:{inner}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{port},WAY://{HOST}:{known_as}",
        "listener.security.protocol.map": PLAIN_PROTOCOL,
    }
    broker.settings = replace(broker.settings, properties=properties)
    return broker, second, known_as


@pytest.fixture(scope="module")
def tier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tier]:
    folder = tmp_path_factory.mktemp("tier-faults")
    broker, second, known_as = broker_with_a_way(folder / "broker")
    with broker, cut_way(known_as, second) as way:
        ways = {"a": broker.bootstrap, "b": broker.bootstrap, "c": f"{HOST}:{known_as}"}
        made = Tier(broker, way, [], folder)
        try:
            for name, bootstrap in ways.items():  # each finds ports that no other one has
                made.machines.append(TierMachine(settings(bootstrap, name), folder / name))
                made.machines[-1].start()
            made.until_shared()
            yield made
            for machine in made.machines:
                machine.stop()
        finally:
            for machine in made.machines:
                machine.kill()


def settings(bootstrap: str, name: str, workers: int = WORKERS) -> dict[str, Any]:
    made = tier_config(bootstrap, "faults", name, workers=workers)
    made["admin"] = admin_ports(workers)
    return {**made, "limits": {"drain_timeout": f"{DRAIN_S:g}s"}}


def test_a_worker_that_is_killed_comes_back(tier: Tier) -> None:
    victim = tier.machines[0]
    with tier.client_of(victim, "killed") as client:
        for number in range(WORKERS):
            until_replaced(victim, number, kill_worker(victim, number))
            client.goes_on()
    tier.until_shared()


def test_the_slots_of_a_worker_that_dies_again_and_again_go_to_others(tier: Tier) -> None:
    victim = tier.machines[1]
    with tier.client_of(victim, "looping") as client:
        for _ in range(CRASHES):
            pid = kill_worker(victim, 0)
            until_replaced(victim, 0, pid)
        until(lambda: slots_of(victim, 0) == 0, "the worker owns nothing", LIMIT_S)
        until_shared(*tier.machines)
        client.goes_on()
    # It has no time to settle here. Until it is asked again, another worker says that it is gone.
    until_readiness(victim, 200, "member b/0 crashes again and again")


def slots_of(machine: TierMachine, number: int) -> float:
    """Return how many slots a worker owns."""
    return machine.metrics().value("slots_owned", member=f"{machine.name}/{number}")


def test_who_is_cut_off_from_kafka_sends_clients_away(tier: Tier) -> None:
    victim = tier.machines[2]
    with tier.client_of(victim, "cut", LIMIT_S) as client:
        tier.way.cut()
        try:
            until_readiness(victim, 503, "out of tier faults")
            until(
                lambda: victim.metrics().value("ready", member=f"{victim.name}/0") == 0,
                "so say metrics",
                SOON_S,
            )
            client.goes_on(DRAIN_S + SOON_S)
            until_shared(*tier.machines[:2])
            # It may be reading slots that it was given before, for as long as it asks a broker.
            until(lambda: victim.slots() == 0, "it owns nothing", SOON_S)
        finally:
            tier.way.mend()
        until_shared(*tier.machines, least=1)
        until(lambda: victim.get("/readyz")[0] == 200, "it is ready again")
        client.goes_on()


def test_who_stands_still_owns_nothing_when_it_goes_on(tier: Tier) -> None:
    victim, others = tier.machines[0], tier.machines[1:]
    put_at_any(tier, 1000)
    with tier.client_of(victim, "frozen") as client:
        victim.freeze()
        try:
            until_shared(*others)
            client.goes_on()
        finally:
            victim.unfreeze()
        is_taken = put(victim, 1001)
        until(lambda: victim.log("the place in the tier is lost"), "it knows")
        tier.until_shared()
        client.goes_on()
    bound = 1001 if is_taken else 1000
    for machine in tier.machines:
        until(lambda machine=machine: has_bound(machine, bound), f"{machine.name} has {bound}")


def until_readiness(machine: TierMachine, status: int, text: str) -> None:
    """Wait until its readiness is this, and says so, at one look."""

    def is_said() -> bool:
        seen, said = machine.get("/readyz")
        return seen == status and text in said

    until(is_said, f"{status} {text}", LIMIT_S)


def put_at_any(tier: Tier, bound: int) -> None:
    """Bound a client, where machines may be in a round of the group and take nothing."""
    until(lambda: any(put(machine, bound) for machine in tier.machines), "it is taken")


def put(machine: TierMachine, bound: int) -> bool:
    """Bound a client; return whether the machine has taken that."""
    return call(machine, "PUT", OVERRIDE, {"consumer_byte_rate": bound}).status == 200


def has_bound(machine: TierMachine, bound: int) -> bool:
    """Return whether a machine has this bound in force."""
    listed = json.loads(machine.get(f"/v1/quotas?member={machine.name}/0")[1])["quotas"]
    return any(each["bounds"].get("consumer_byte_rate") == bound for each in listed)


def test_the_workers_of_a_dead_launcher_end(tier: Tier) -> None:
    victim, others = tier.machines[1], [tier.machines[0], tier.machines[2]]
    with tier.client_of(victim, "orphan") as client:
        pids = list(worker_pids(victim).values())
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: all(map(is_gone, pids)), "the workers have ended", END_LIMIT_S)
        victim.kill()
        until_shared(*others)
        client.goes_on()
        victim.start()
        tier.until_shared()
        client.goes_on()


def test_a_machine_serves_again_when_its_successor_gives_up(tier: Tier) -> None:
    victim = tier.machines[0]
    with tier.client_of(victim, "resumed") as client:
        with closing(Predecessor(victim.pid)) as predecessor:
            assert predecessor.release()
            until(lambda: not answers(victim), "the admin port is released")
            until_shared(*tier.machines[1:])
        until(lambda: answers(victim), "it answers again")
        tier.until_shared()
        client.goes_on()
    put_at_any(tier, 2000)
    until(lambda: has_bound(victim, 2000), "it follows")


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_who_cannot_join_again_after_a_take_over_does_so_later(tier: Tier, workers: int) -> None:
    """Kafka does not answer as the successor gives up."""
    way = yaml.safe_load(tier.machines[2].config_file.read_text())["cluster"]
    made = settings(way["bootstrap_servers"][0], f"late-{workers}", workers)
    victim = TierMachine(made, tier.folder / f"late-{workers}")
    machines = [*tier.machines, victim]
    try:
        victim.start()
        until_shared(*machines)
        with closing(Predecessor(victim.pid)) as predecessor:
            assert predecessor.release()
            until(lambda: not answers(victim), "the admin port is released")
            tier.way.cut()
        try:
            failed = "tier not joined again"
            until(lambda: len(victim.log(failed)) >= workers, "it waits for Kafka", LIMIT_S)
            until_readiness(victim, 503, "out of tier faults")
        finally:
            tier.way.mend()
        until_shared(*machines)
        until(lambda: victim.get("/readyz")[0] == 200, "it is ready again")
        with Steady(victim.bootstrap, f"late-{workers}", tier.topic(), ANSWER_LIMIT_S):
            pass
        victim.stop()
    finally:
        victim.kill()
    tier.until_shared()


def answers(machine: TierMachine) -> bool:
    """Whether a member answers at the admin port, where connections wait for one."""
    with (
        suppress(OSError),
        urllib.request.urlopen(f"{machine.admin_url}/healthz", timeout=1) as answer,
    ):
        return bool(answer.status == 200)
    return False


def test_a_successor_that_cannot_join_costs_nothing(tier: Tier) -> None:
    victim = tier.machines[0]
    run = ["run", "-c", str(victim.config_file), "--take-over", str(victim.pid)]
    with tier.client_of(victim, "failing") as client:
        ended = subprocess.run(
            [sys.executable, "-c", FAILING, *run],
            env=environment(),
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert (ended.returncode, b"it fails here" in ended.stderr) == (1, True), ended.stderr
        tier.until_shared()
        client.goes_on()


FAILING = """
import sys
from proxy import cli
from proxy.tier import tier_member
join = tier_member.TierMember.join
async def fail(self, admin_port):
    await join(self, admin_port)
    raise tier_member.StateError("it fails here", "nothing")
tier_member.TierMember.join = fail
sys.exit(cli.main())
"""


def test_a_start_without_kafka_says_what_is_wrong(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "proxy.yaml"
    file.write_text(yaml.safe_dump(settings(f"{HOST}:{port}", "alone")))
    code, _, errors = quota_proxy("run", "-c", file)
    assert code == 1
    assert f"{HOST}:{port}" in errors
    assert "fix: " in errors


def test_machines_with_different_rules_say_so_and_agree_on_owners(tier: Tier) -> None:
    odd = tier.machines[2]
    before = yaml.safe_load(odd.config_file.read_text())
    rule = {"client-id-prefix": "odd", "consumer_byte_rate": 10**9, "scope": "shared"}
    quotas = {**before["quotas"], "rules": [rule]}
    write(odd, {**before, "quotas": quotas})
    for machine in tier.machines:
        until(lambda machine=machine: warned(machine), f"{machine.name} warns")
    for name in (f"odd-{number}" for number in range(5)):
        until(lambda name=name: len(owners_of(tier, name)) == 1, f"all say the same of {name}")
    write(odd, before)
    for machine in tier.machines:
        until(lambda machine=machine: not warned(machine), f"{machine.name} warns no more")


def owners_of(tier: Tier, client_id: str) -> set[str]:
    """Return the machines to which those of the tier send a client."""
    return {owner_of([each, *tier.machines], client_id).name for each in tier.machines}


def warned(machine: TierMachine) -> bool:
    text = "have different rules"
    return text in machine.get("/readyz")[1] and text in machine.get("/v1/status")[1]


def test_all_machines_may_stop_at_once(tier: Tier) -> None:
    name, owner = tier.topic(), tier.machines[1]
    client_id = report_to(tier.machines, owner, "kept", name)
    began_s = time.monotonic()
    for machine in tier.machines:
        machine.terminate()
    for machine in tier.machines:
        assert machine.wait() == 0
        machine.check_log()
    assert time.monotonic() - began_s < DRAIN_S + END_LIMIT_S
    with ThreadPoolExecutor() as pool:
        list(pool.map(TierMachine.start, tier.machines))
    tier.until_shared()
    until(
        lambda: client_id in owner_of(tier.machines, client_id).get("/v1/progress")[1],
        "its owner knows the query",
    )


def test_who_is_told_to_stop_while_cut_off_ends_in_time(tier: Tier) -> None:
    victim = tier.machines[2]
    report_to(tier.machines, victim, "late", tier.topic())
    with tier.client_of(victim, "stopped") as client:
        tier.way.cut()
        try:
            began_s = time.monotonic()
            victim.terminate()
            assert victim.wait() == 0
            took_s = time.monotonic() - began_s
            victim.check_log()
            client.goes_on()
        finally:
            tier.way.mend()
        assert took_s < DRAIN_S + END_LIMIT_S
        victim.start()
    tier.until_shared()


def test_an_address_that_others_cannot_reach_is_told(tier: Tier) -> None:
    """A fourth machine says that it is where nobody listens."""
    made = settings(tier.broker.bootstrap, "d", workers=1)
    made["listeners"][0]["advertised_host"] = NOWHERE
    made["tier"]["admin_host"] = HOST
    odd = TierMachine(made, tier.folder / "d")
    try:
        odd.start()
        for machine in tier.machines:
            until(lambda machine=machine: is_missed(machine), f"{machine.name} warns")
            assert machine.get("/readyz")[0] == 200
            told = machine.log("a member is not reached where clients are sent to")
            assert {line["member"] for line in told} == {"d/0"}
            assert "advertised_host" in told[0]["fix"]
        assert not is_missed(odd)
        odd.stop()
        for machine in tier.machines:
            until(lambda machine=machine: not is_missed(machine), f"{machine.name} is content")
    finally:
        odd.kill()


def is_missed(machine: TierMachine) -> bool:
    return "clients may not reach member d/0 (127.0.0.9" in machine.get("/readyz")[1]
