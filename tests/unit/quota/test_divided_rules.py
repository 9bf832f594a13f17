"""A rule divided among members, on virtual time: together its bound, no more and little less."""

import itertools

import pytest
from closed_loop import CONSUMER, MB, WINDOW_MS, ClosedLoop, Consumer
from parts.quota_world import QuotaWorld

from metrics.clock import MS_PER_SECOND
from proxy.quota.budget_leases import (
    ASK_EVERY_MS,
    VOTE_MS,
    ActiveLease,
    BudgetClaim,
    BudgetOwner,
    Demand,
    InnerClaim,
    RateLease,
    ReceivedVotes,
    VoterSet,
    claim_of,
    is_sensor_idle,
)
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.manager import QuotaManager
from proxy.quota.rules import Budget, Rule, Share
from proxy.quota.shares import Claim

RATE = 2 * MB
SHARED = Rule(client_id_prefix="s", scope="shared", bounds={CONSUMER: RATE})
LOOK_MS, WAY_MS = 100.0, 1.0
BEGIN_MS, END_MS = 6_000.0, 40_000.0
ASKED_BYTES = 50 * MB
SLOW = Rule(client_id="a", bounds={CONSUMER: RATE})


class Member:
    """What one member has of the rule; it asks the owner as `BudgetLeasing` does."""

    def __init__(self, world: "Tier", name: str) -> None:
        self.world, self.name = world, name
        self.quotas: QuotaManager = QuotaWorld(SHARED).quotas
        self.quotas.divide(lambda _: True)
        self.quotas.on_leased = lambda: world.loop.at(world.loop.now_ms, self.ask)
        self.user, self.moved, self.asked_ms = ActiveLease(), 0.0, 0.0

    def look(self) -> None:
        now_ms = self.world.loop.now_ms
        self.world.votes.take(self.name, now_ms)
        self.world.loop.at(now_ms + LOOK_MS, self.look)
        for meter in self.quotas.leased.values():
            meter.lease_rate(self.user.rate(now_ms), now_ms)
            if now_ms - self.asked_ms >= ASK_EVERY_MS and not is_sensor_idle(meter, now_ms):
                self.ask()

    def ask(self) -> None:
        world, now_ms = self.world, self.world.loop.now_ms
        for meter in self.quotas.leased.values():
            claim = claim_of(meter, self.moved, now_ms - self.asked_ms, now_ms)
            self.moved, self.asked_ms, number = meter.moved, now_ms, next(world.numbers)
            uses = self.user.in_use(now_ms)
            demand = Demand(self.name, number, uses, claim)

            def answer(demand: Demand = demand) -> None:
                world.votes.take(self.name, world.loop.now_ms)
                lease = world.owner.answer(demand, world.votes, world.loop.now_ms)
                assert lease is not None
                world.loop.at(world.loop.now_ms + WAY_MS, lambda: self.take(lease, now_ms))

            world.loop.at(now_ms + WAY_MS, answer)

    def take(self, lease: RateLease, asked_ms: float) -> None:
        now_ms = self.world.loop.now_ms
        is_lower = self.user.take(lease, asked_ms, now_ms)
        for meter in self.quotas.leased.values():
            meter.lease_rate(self.user.rate(now_ms), now_ms)
        if is_lower:
            self.ask()


class Tier:
    """Some members, and the clients of one rule at them."""

    def __init__(self, members: int) -> None:
        self.loop = ClosedLoop(QuotaWorld(SLOW).quotas)
        self.owner, self.votes, self.numbers = (
            BudgetOwner(RATE, 0.0),
            ReceivedVotes(VoterSet()),
            itertools.count(1),
        )
        self.members = [Member(self, f"m{at}") for at in range(members)]
        self.votes.voters.use(frozenset(each.name for each in self.members), -VOTE_MS)
        for member in self.members:
            self.votes.take(member.name, 0.0)
            self.loop.at(0.0, member.look)
        self.connections: dict[str, list[Consumer]] = {}

    def reads(
        self, client_id: str, at: int, connections: int, begin_ms: float, end_ms: float
    ) -> None:
        client = self.members[at].quotas.client(ClientIdentity("l", None, client_id))
        for _ in range(connections):
            number = sum(map(len, self.connections.values()))
            made = Consumer(
                *(self.loop, number, ASKED_BYTES),
                batch_bytes=20_000,
                client=client,
                ends_ms=end_ms,
            )
            self.connections.setdefault(client_id, []).append(made)
            self.loop.at(begin_ms + 0.1 * number, made.ask)

    def rate(self, client_id: str) -> float:
        got = (each for made in self.connections[client_id] for each in made.got)
        size = sum(size for _, at_ms, size in got if BEGIN_MS <= at_ms < END_MS)
        return size / (END_MS - BEGIN_MS) * MS_PER_SECOND


@pytest.mark.parametrize("spread", [(1, 1, 1), (3, 1, 0), (5, 2, 1)])
@pytest.mark.parametrize("connections", [1, 4])
def test_clients_have_equal_shares_wherever_they_are(spread, connections):
    tier = Tier(len(spread))
    names = [f"s-{at}-{each}" for at, many in enumerate(spread) for each in range(many)]
    for name in names:
        tier.reads(name, int(name[2]), connections, 0.0, END_MS)
    tier.loop.run(END_MS)
    rates = [tier.rate(name) for name in names]
    # A client with one connection asks for more only when it has had its answer.
    assert sum(rates) == pytest.approx(RATE, rel=0.03 if connections > 1 else 0.06)
    assert tier.loop.most_in() <= 1.05 * RATE * WINDOW_MS / MS_PER_SECOND
    assert min(rates) >= (0.8 if connections > 1 else 0.6) * RATE / len(names)


@pytest.mark.parametrize("stay_ms", [300.0, 1_100.0, 2_600.0, 12_000.0])
@pytest.mark.parametrize("rest_ms", [0.0, 1_500.0])
@pytest.mark.parametrize("connections", [1, 30])
def test_hopping_between_members_idling_and_bursting_gains_nothing(stay_ms, rest_ms, connections):
    tier, begin_ms = Tier(3), 0.0
    for hop in itertools.count():
        if begin_ms >= END_MS:
            break
        tier.reads(f"s-{hop}", hop % 3, connections, begin_ms, begin_ms + stay_ms)
        begin_ms += stay_ms + rest_ms
    tier.reads("s", 0, 1, 0.0, END_MS)
    tier.loop.run(END_MS)
    most = 1.05 * RATE * WINDOW_MS / MS_PER_SECOND + connections * 20_000
    assert tier.loop.most_in() <= most


def test_what_is_not_leased_lets_one_answer_pass_which_is_owed():
    quotas = QuotaWorld(SHARED).quotas
    quotas.divide(lambda _: True)
    client = quotas.client(ClientIdentity("l", None, "s"))
    assert client.charge(CONSUMER, 1000.0, 0.0) is None
    held = client.charge(CONSUMER, 1000.0, 1.0)
    assert held is not None
    (meter,) = quotas.leased.values()
    assert held.delay_ms <= 1000.0
    meter.lease_rate(1000.0, 2.0)
    assert meter.debt_ms(2.0) == pytest.approx(2000.0, rel=0.01)
    assert meter.shown_bound == RATE


def test_a_bound_that_is_divided_no_more_is_whole_and_the_other_way_round():
    quotas = QuotaWorld(SHARED).quotas
    client = quotas.client(ClientIdentity("l", None, "s"))
    client.charge(CONSUMER, 1000.0, 0.0)
    meter = client.meters[CONSUMER]
    assert (meter.leased, meter.bound) == (None, RATE)
    quotas.divide(lambda _: True)
    client.charge(CONSUMER, 1000.0, 1.0)
    assert (meter.leased, [*quotas.leased.values()]) == (0.0, [meter])
    quotas.divide(lambda _: False)
    client.charge(CONSUMER, 1000.0, 2.0)
    assert (meter.leased, meter.bound, quotas.leased) == (None, RATE, {})


def test_what_a_visitor_had_of_a_part_is_not_charged_to_another_part():
    quotas = QuotaWorld(SHARED).quotas
    quotas.divide(lambda _: True)
    visitor = ClientIdentity("l", None, "s")
    client = quotas.client(visitor)
    client.charge(CONSUMER, 1000.0, 0.0)
    assert quotas.charge_visit(visitor, "10.0.0.9", CONSUMER, 5000.0, 1.0) == 0.0
    assert client.meters[QuotaKind.CONSUMER_BYTE_RATE].moved == 1000.0
    assert quotas.debts(lambda _: True, 2.0) == []


def test_a_share_of_a_budget_that_is_divided_counts_once():
    claim = BudgetClaim(1.0, 5.0, 1e9, {"user=a": InnerClaim(3.0, 1.0, 60.0)})
    assert BudgetClaim.of(claim.row()) == claim
    others = Claim(1.0, 5.0, most=1e9)
    assert claim.among({}) == {others: 1, Claim(3.0, 60.0, most=1e9): 1}
    assert claim.among({"user=a": 2.0}) == {others: 1, Claim(1.5, 30.0, most=1e9): 1}
    assert claim.lasting == 5.0


def test_who_has_a_divided_share_of_a_budget_is_claimed_so():
    budget = Budget(name="b", bounds={CONSUMER: RATE})
    rules = [
        Rule(user="a", bounds={}, share=Share(budget, 3.0, 60.0)),
        Rule(client_id="c", bounds={}, share=Share(budget, 1.0, 5.0)),
    ]
    quotas = QuotaWorld(*rules).quotas
    quotas.divide(lambda rule: rule.user is not None or isinstance(rule, Budget))
    for user in ("a", None):
        quotas.client(ClientIdentity("l", user, "c")).charge(CONSUMER, 100.0, 0.0)
    claim = claim_of(quotas.leased["consumer_byte_rate:budget=b"], 0.0, 1000.0, 0.0)
    assert (claim.weight, claim.guaranteed, claim.own) == (0.0, 0.0, {(1.0, 5.0): 1})
    assert claim.inner == {"user=a": InnerClaim(3.0, 1.0, 60.0)}
