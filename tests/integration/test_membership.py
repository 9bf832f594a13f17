"""Members of a tier in one group of a real broker: they come, go, die, freeze and are refused."""

import asyncio
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from typing import Any

import pytest
from kafka.protocol.producer import (
    AddOffsetsToTxnRequest,
    InitProducerIdRequest,
    TxnOffsetCommitRequest,
)
from parts.even_placement import even
from support.coordinators import coordinated_elsewhere
from support.detour import detour

from examples.devkit.broker import EmbeddedBroker, EmbeddedCluster
from examples.devkit.loopback import HOST
from proxy.cluster.broker_connection import CLIENT_ID, BrokerConnection
from proxy.cluster.kafka_client import (
    TRANSACTION_COORDINATOR,
    Bootstrap,
    KafkaClient,
)
from proxy.cluster.login import Credentials, Login
from proxy.cluster.upstream import UpstreamError
from proxy.relay.steering import AdvertisedListener, MemberAddresses
from proxy.tier.group.group_documents import NO_GENERATION, Subscription
from proxy.tier.group.group_member import (
    RELEASE_LIMIT_S,
    SESSION_TIMEOUT_S,
    GroupMember,
    MembershipError,
)
from proxy.tier.group.slot_states import SlotStates
from proxy.tier.slot_map import SLOTS, SlotMap

PATIENCE_S = 30.0
"""More than a busy machine takes."""

pytestmark = pytest.mark.slow

SESSION_S = 6.0
"""The shortest that brokers allow."""
WAIT_S = 40.0
RESTART_LIMIT_S = 100.0
"""For a broker to start, which on a busy machine takes longer than on others a session."""

_names = (f"tier-{number}" for number in count())


@pytest.fixture
def group() -> str:
    return next(_names)


@dataclass
class Machine:
    """A machine, and what its group tells it."""

    name: str
    group: str
    bootstrap: Bootstrap
    cluster_id: str = "one"
    release_s: float = 0.0
    session_s: float = SESSION_S
    maps: list[SlotMap] = field(default_factory=list)
    revoked: list[frozenset[int]] = field(default_factory=list)
    holds: set[int] = field(default_factory=set)
    """What it would serve: from `on_assigned` until it released or lost them."""
    reached: frozenset[str] = frozenset()
    """The other members, each as soon as it is heard of."""
    lost: int = 0
    holds_on: bool = False
    """Whether the last map holds while the coordinator is not heard."""
    asked: int = 0
    """How often that was asked."""

    def __post_init__(self) -> None:
        self.slots = SlotStates()
        self.member = GroupMember(
            self.bootstrap,
            self.group,
            self.slots,
            self.announce,
            on_assigned=self.assigned,
            on_revoked=self.release,
            on_lost=self.forget,
            may_hold=self.may_hold,
            place=even,
            session_timeout_s=self.session_s,
        )
        self.task = asyncio.create_task(self.member.run())

    def announce(self) -> Subscription:
        ports = {"default": AdvertisedListener(f"{self.name}.example", 9092, 9100, 9199)}
        url = f"http://{self.name}:8080"
        return Subscription(
            MemberAddresses(self.name, ports),
            url,
            self.cluster_id,
            "rules",
            time.time(),
            reached=self.reached,
        )

    def assigned(self) -> None:
        assert self.slots.assignment is not None
        self.maps.append(slot_map := self.slots.assignment.slot_map)
        self.holds |= self.given
        others = frozenset(slot_map.members) - {self.name}
        if others != self.reached:
            self.reached = others
            self.member.request_rebalance(at_once=True)

    async def release(self, slots: frozenset[int]) -> None:
        self.revoked.append(slots)
        try:
            await asyncio.sleep(self.release_s)
        finally:
            self.holds -= slots

    async def may_hold(self, generation: int) -> bool:
        assert generation == self.member.fence.generation
        self.asked += 1
        return self.holds_on

    def forget(self) -> None:
        self.lost += 1
        self.holds.clear()

    @property
    def given(self) -> set[int]:
        """The slots that the newest map gives to it."""
        newest = self.maps[-1] if self.maps else SlotMap({}, ())
        return set(newest.slots_of(self.name))

    async def die(self) -> None:
        """End without a word, as after kill -9."""
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    async def stop(self) -> None:
        self.member.stop()
        await asyncio.wait_for(self.task, WAIT_S)


class Tier:
    """The machines of one test; at each look nobody may have a slot of another."""

    def __init__(self, group: str, bootstrap: str) -> None:
        self.group = group
        self.bootstrap = bootstrap
        self.machines: list[Machine] = []

    def start(self, name: str, way: Bootstrap | None = None, **what: Any) -> Machine:
        host, port = self.bootstrap.split(":")
        machine = Machine(name, self.group, way or Bootstrap([(host, int(port))]), **what)
        self.machines.append(machine)
        return machine

    async def until(self, holds: Callable[[], bool], what: str) -> float:
        """Wait; return how long it took, in seconds."""
        begin = time.monotonic()
        while not holds():
            self.check()
            for machine in self.machines:
                if machine.task.done() and not machine.task.cancelled():
                    assert machine.task.exception() is None
            assert time.monotonic() - begin < WAIT_S, (what, self.holdings())
            await asyncio.sleep(0.02)
        self.check()
        return time.monotonic() - begin

    async def shared(self, *machines: Machine) -> float:
        """Wait until these machines share all slots evenly, by one map."""

        def is_shared() -> bool:
            least = SLOTS // len(machines)
            generations = {
                -1 if (newest := each.slots.assignment) is None else newest.generation
                for each in machines
            }
            return (
                sum(len(machine.holds) for machine in machines) == SLOTS
                and all(least <= len(m.holds) and m.holds == m.given for m in machines)
                and len(generations) == 1
            )

        return await self.until(is_shared, f"shared by {[each.name for each in machines]}")

    def check(self) -> None:
        held = [slot for machine in self.machines for slot in machine.holds]
        assert len(held) == len(set(held)), self.holdings()

    def holdings(self) -> list[tuple[str, int, str | None]]:
        return [(each.name, len(each.holds), each.member.problem) for each in self.machines]


@asynccontextmanager
async def tier_of(group: str, bootstrap: str) -> AsyncIterator[Tier]:
    tier = Tier(group, bootstrap)
    try:
        yield tier
    finally:
        for machine in tier.machines:
            machine.task.cancel()
        await asyncio.gather(*(machine.task for machine in tier.machines), return_exceptions=True)


@pytest.fixture
async def tier(kafka: EmbeddedBroker, group: str) -> AsyncIterator[Tier]:
    async with tier_of(group, kafka.bootstrap) as made:
        yield made


async def test_machines_come_leave_and_die(tier: Tier) -> None:
    a = tier.start("a", release_s=0.3)
    await tier.shared(a)
    b, c = tier.start("b"), tier.start("c")
    await tier.shared(a, b, c)
    assert a.revoked
    assert not a.lost
    before = set(a.holds)
    begin = time.monotonic()
    await b.stop()
    await tier.shared(a, c)
    left_s = time.monotonic() - begin
    assert before <= a.holds
    assert not b.lost
    assert not b.holds
    assert b.member.fence.generation == NO_GENERATION
    begin = time.monotonic()
    await c.die()
    assert c.lost == 1
    await tier.shared(a)
    died_s = time.monotonic() - begin
    assert SESSION_S - 1.5 < died_s < SESSION_S + PATIENCE_S
    assert left_s < PATIENCE_S


async def test_who_does_not_release_is_not_waited_for_longer_than_the_limit(tier: Tier) -> None:
    a = tier.start("a", release_s=2 * WAIT_S)
    await tier.shared(a)
    b = tier.start("b")
    took_s = await tier.shared(a, b)
    assert RELEASE_LIMIT_S - 0.5 < took_s < RELEASE_LIMIT_S + PATIENCE_S
    assert not a.lost
    a.release_s = 0.0


async def test_one_that_was_restarted_in_time_has_its_slots_again(tier: Tier) -> None:
    a, b = tier.start("a"), tier.start("b")
    await tier.shared(a, b)
    before, process = set(b.holds), a.slots.assignment.members["b"].process
    revoked = list(a.revoked)  # for b, if a was alone first
    await b.die()
    again = tier.start("b")
    await tier.shared(a, again)
    assert again.holds == before
    assert a.revoked == revoked
    # The others have heard of the new process.
    await tier.until(lambda: a.slots.assignment.members["b"].process != process, "new process")


class Through(Bootstrap):
    """All connections go by one way, whatever address the cluster tells."""

    async def connect(self, _servers: Any = (), **how: Any) -> BrokerConnection:
        return await super().connect((), **how)


async def test_one_that_was_cut_off_has_nothing_before_another_gets_it(
    tier: Tier, kafka: EmbeddedBroker
) -> None:
    """Requests of b get lost without a word for longer than its session, and then no more."""
    async with detour(kafka.bootstrap) as way:
        a = tier.start("a")
        b = tier.start("b", Through([way.address]))
        await tier.shared(a, b)
        way.swallow = CLIENT_ID.encode()
        lost_s = await tier.until(lambda: b.lost == 1, "b has nothing")
        assert SESSION_S - 1.5 < lost_s < SESSION_S + PATIENCE_S
        assert b.member.problem
        await tier.shared(a)
        way.swallow = None
        await tier.shared(a, b)
        assert b.member.problem is None


async def test_while_nobody_hears_the_coordinator_the_last_map_holds(
    tier: Tier, kafka: EmbeddedBroker
) -> None:
    """For longer than the sessions last."""
    async with detour(kafka.bootstrap) as way:
        a, b = (tier.start(name, Through([way.address]), holds_on=True) for name in "ab")
        await tier.shared(a, b)
        before = set(a.holds), set(b.holds)
        way.swallow = CLIENT_ID.encode()
        end_s = time.monotonic() + 2 * SESSION_S
        await tier.until(lambda: time.monotonic() > end_s, "two sessions are over")
        assert min(a.asked, b.asked) > 1
        assert a.member.problem
        assert b.member.problem
        assert (a.holds, b.holds, a.lost, b.lost) == (*before, 0, 0)
        # As when they know that another one was heard by the coordinator.
        a.holds_on = b.holds_on = False
        await tier.until(lambda: a.lost == b.lost == 1, "they have nothing")
        assert not a.holds
        assert not b.holds
        way.swallow = None
        await tier.shared(a, b)


async def test_who_may_not_hold_the_last_map_any_more_has_nothing_at_once(
    tier: Tier, kafka: EmbeddedBroker
) -> None:
    async with detour(kafka.bootstrap) as way:
        a = tier.start("a", Through([way.address]), holds_on=True)
        await tier.shared(a)
        assert not a.asked
        way.swallow = CLIENT_ID.encode()
        await tier.until(lambda: a.asked > 1, "it asks again and again")
        assert (len(a.holds), a.lost) == (SLOTS, 0)
        a.holds_on = False
        assert await tier.until(lambda: a.lost == 1, "it has nothing") < SESSION_S
        assert not a.holds
        way.swallow = None
        await tier.shared(a)


async def test_one_that_froze_loses_its_slots_and_comes_back(tier: Tier) -> None:
    """A process of its own is stopped beyond its session, and then goes on."""
    a = tier.start("a")
    await tier.shared(a)
    script = Path(__file__).parent / "support" / "frozen_machine.py"
    other = await asyncio.create_subprocess_exec(
        sys.executable, str(script), tier.bootstrap, tier.group, str(SESSION_S), stdout=PIPE
    )

    async def said(wanted: bytes) -> list[bytes]:
        lines = []
        async with asyncio.timeout(WAIT_S):
            while not lines or lines[-1] != wanted:
                line = (await other.stdout.readline()).strip()
                assert line, lines
                if line.isalnum():  # others are its log's
                    lines.append(line)
        return lines

    try:
        await said(b"128")
        other.send_signal(SIGSTOP)
        await tier.shared(a)
        other.send_signal(SIGCONT)
        lines = await said(b"128")
        # It has noticed before it did anything else, and had nothing until it was given it.
        assert lines[0] == b"lost"
        await tier.until(lambda: len(a.holds) == SLOTS // 2, "a shares again")
    finally:
        other.kill()
        await other.wait()


async def test_the_later_of_two_with_one_name_has_the_place(tier: Tier) -> None:
    a, first = tier.start("a"), tier.start("b")
    await tier.shared(a, first)
    second = tier.start("b")
    with pytest.raises(MembershipError, match=r"another process has joined .* as machine b"):
        await asyncio.wait_for(asyncio.shield(first.task), WAIT_S)
    assert first.lost == 1
    tier.machines.remove(first)
    await tier.shared(a, second)


async def test_a_machine_of_another_cluster_is_refused(tier: Tier) -> None:
    a = tier.start("a")
    await tier.shared(a)
    stranger = tier.start("b", cluster_id="two")
    await tier.until(lambda: stranger.member.refusal is not None, "refused")
    assert "another tier.name" in stranger.member.refusal.reason
    assert "another tier.name" in stranger.member.problem
    await tier.shared(a)
    assert not stranger.holds
    # Between two tries of the stranger's there is a round without it.
    refused = [stranger.member.refusal]
    await tier.until(lambda: list(a.slots.assignment.refused.values()) == refused, "named")


async def test_a_round_that_is_asked_for_tells_what_is_new(tier: Tier) -> None:
    a, b = tier.start("a"), tier.start("b")
    await tier.shared(a, b)
    rounds = len(a.maps)
    for _ in range(20):
        b.member.request_rebalance()
        await asyncio.sleep(0.01)
    await tier.until(lambda: len(a.maps) > rounds, "a round")
    await tier.shared(a, b)
    assert len(a.maps) <= rounds + 2
    assert not a.revoked or not a.lost


async def test_a_group_of_consumers_is_not_ours(
    kafka: EmbeddedBroker, topic: Any, tier: Tier
) -> None:
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": kafka.bootstrap, "group.id": tier.group}
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe([topic()])
        for _ in range(100):
            consumer.poll(0.1)
            if consumer.assignment():
                break
        a = tier.start("a")
        with pytest.raises(MembershipError, match="not one of quota-proxy machines"):
            await asyncio.wait_for(asyncio.shield(a.task), WAIT_S)


async def test_it_logs_in(kafka: EmbeddedBroker, tier: Tier) -> None:
    host, port = kafka.sasl_bootstrap.split(":")
    login = Login(Credentials("SCRAM-SHA-256", "alice", "alice-secret"))
    machine = tier.start("a", Bootstrap([(host, int(port))], login=login))
    await tier.shared(machine)
    await machine.stop()
    assert machine.member.fence.member_id == ""


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("membership")) as broker:
        yield broker


async def test_nothing_moves_while_a_broker_restarts(
    own_broker: EmbeddedBroker, group: str
) -> None:
    async with tier_of(group, own_broker.bootstrap) as tier:
        a, b = (tier.start(name, session_s=RESTART_LIMIT_S) for name in "ab")
        await tier.shared(a, b)
        generation = a.member.fence.generation
        revoked = len(a.revoked), len(b.revoked)  # by who came first, if not both at once
        await asyncio.to_thread(own_broker.kill)
        await tier.until(lambda: bool(a.member.problem and b.member.problem), "seen")
        await asyncio.to_thread(own_broker.start)
        await tier.until(lambda: not a.member.problem and not b.member.problem, "back")
        assert a.lost == b.lost == 0
        assert (len(a.revoked), len(b.revoked)) == revoked
        await tier.shared(a, b)
        assert a.member.fence.generation <= generation + 1


async def test_nothing_is_owned_when_a_broker_was_away_for_long(
    own_broker: EmbeddedBroker, group: str
) -> None:
    async with tier_of(group, own_broker.bootstrap) as tier:
        a, b = tier.start("a"), tier.start("b")
        await tier.shared(a, b)
        before = set(a.holds), set(b.holds)
        await asyncio.to_thread(own_broker.kill)
        await tier.until(lambda: bool(a.lost and b.lost), "nothing is owned without a broker")
        assert a.member.problem
        await asyncio.to_thread(own_broker.start)
        await tier.shared(a, b)
        assert (a.holds, b.holds) == before


async def test_the_coordinator_dies_and_another_broker_goes_on(tmp_path: Path, group: str) -> None:
    properties = {
        "broker.session.timeout.ms": "3000",
        "offsets.topic.replication.factor": "3",
        "min.insync.replicas": "1",
    }
    with EmbeddedCluster(tmp_path, 3, properties=properties) as cluster:
        name, broker = await asyncio.to_thread(coordinated_elsewhere, cluster, group)
        everyone = Bootstrap([(HOST, each.port) for each in cluster.brokers])
        async with tier_of(name, broker.bootstrap) as tier:
            a = tier.start("a", everyone, session_s=SESSION_TIMEOUT_S)
            b = tier.start("b", everyone, session_s=SESSION_TIMEOUT_S)
            await tier.shared(a, b)
            revoked = list(a.revoked)
            await asyncio.to_thread(broker.kill)
            await tier.until(lambda: bool(a.member.problem and b.member.problem), "seen")
            back_s = await tier.until(
                lambda: not a.member.problem and not b.member.problem, "another coordinator"
            )
            print(f"{back_s=:.2f}")  # noqa: T201
            assert a.lost == b.lost == 0
            assert a.revoked == revoked
            await tier.shared(a, b)


async def test_kafka_refuses_transactions_of_who_is_no_member_any_more(
    tier: Tier, kafka: EmbeddedBroker, topic: Callable[..., str]
) -> None:
    """As a store does that writes only while its machine is in the tier (KIP-447)."""
    name = topic()
    a, b = tier.start("a"), tier.start("b")
    await tier.shared(a, b)
    with closing(KafkaClient(Bootstrap([(HOST, kafka.port)]))) as client:
        ids = await begin_transaction(client, f"of {tier.group}", tier.group)

        async def commit(member_id: str, generation: int) -> int:
            request = TxnOffsetCommitRequest[3](
                transactional_id=f"of {tier.group}",
                group_id=tier.group,
                producer_id=ids[0],
                producer_epoch=ids[1],
                generation_id=generation,
                member_id=member_id,
                group_instance_id="b",
                topics=[(name, [(0, 1, -1, "")])],
            )
            return (await client.ask(request)).topics[0].partitions[0].error_code

        before = b.member.fence.member_id, b.member.fence.generation
        assert await commit(*before) == 0
        await b.die()
        again = tier.start("b")
        await tier.shared(a, again)
        assert await commit(*before) == 82  # FENCED_INSTANCE_ID
        # Kafka began no round for it: the generation may be the same, the member id is not.
        await tier.until(lambda: again.member.fence.generation > before[1], "a round of its own")
        await tier.shared(a, again)
        assert await commit(again.member.fence.member_id, before[1]) == 22  # ILLEGAL_GENERATION
        assert await commit(again.member.fence.member_id, again.member.fence.generation) == 0


async def begin_transaction(client: KafkaClient, name: str, group: str) -> tuple[int, int]:
    def check(error_code: int) -> None:
        if error_code:
            raise UpstreamError("not_ready", str(error_code))

    async def begin() -> tuple[int, int]:
        await client.coordinator((TRANSACTION_COORDINATOR, name), check)
        made = await client.ask(
            InitProducerIdRequest[3](
                transactional_id=name,
                transaction_timeout_ms=60_000,
                producer_id=-1,
                producer_epoch=-1,
            )
        )
        check(made.error_code)
        added = await client.ask(
            AddOffsetsToTxnRequest[1](
                transactional_id=name,
                producer_id=made.producer_id,
                producer_epoch=made.producer_epoch,
                group_id=group,
            )
        )
        check(added.error_code)
        return made.producer_id, made.producer_epoch

    async with client.within(WAIT_S):
        return await client.retry(begin)
