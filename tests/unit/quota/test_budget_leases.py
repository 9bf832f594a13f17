"""Leases of a budget's rate, on virtual time, over a network that loses, doubles and delays."""

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.quota.budget_leases import (
    ASK_EVERY_MS,
    ASK_LIMIT_MS,
    GUARANTEE_MS,
    NO_LEASE,
    RATE_LEASE_MS,
    SKEW_MS,
    VOTE_MS,
    ActiveLease,
    BudgetClaim,
    BudgetOwner,
    Demand,
    OwnerVote,
    RateLease,
    ReceivedVotes,
    VoterSet,
)
from proxy.quota.shares import Claim, divide_fairly

BUDGET = 200.0
GUARANTEED = 4.0
END_MS = 30_000.0
LONGEST_DELAY_MS = 5_000.0
SETTLED_MS = 3 * (RATE_LEASE_MS + SKEW_MS)
ALL = BudgetClaim()


LOOK_EVERY_MS = 100.0
FIRST = "first"
"""The owner that all ask in the beginning; `second` is another one."""


@dataclass
class Process:
    """One that may lease the budget."""

    owner: BudgetOwner
    votes: ReceivedVotes = field(default_factory=lambda: ReceivedVotes(VoterSet()))
    looked_ms: float = 0.0
    view: int = 0
    """The number of the one that it has heard of."""

    def is_awake(self, now_ms: float) -> bool:
        """Look at the clock, as it does all the time; return whether it has stood still."""
        stood_still = now_ms - self.looked_ms >= SKEW_MS
        self.looked_ms = now_ms
        if stood_still:
            members = self.votes.voters.members
            self.votes = ReceivedVotes(VoterSet())
            self.votes.voters.use(members, now_ms)
        return not stood_still


@dataclass
class Network:
    """Members and owners; each message takes as long as `delay_ms` says, `None`: it is lost."""

    claims: dict[str, BudgetClaim]
    delay_ms: Callable[[], float | None] = lambda: 1.0
    guaranteed: float = 0.0
    now_ms: float = 0.0
    users: dict[str, tuple[str, OwnerVote, ActiveLease]] = field(init=False)
    """By the names of members, with the names of their processes."""
    asked: dict[str, str] = field(default_factory=dict)
    """Whom a member takes for the owner, if not FIRST."""
    offsets_ms: dict[str, float] = field(default_factory=dict)
    """By how much each member's clock is ahead."""
    frozen_until_ms: dict[str, float] = field(default_factory=dict)
    failing: set[tuple[str, str]] = field(default_factory=set)
    """Members with the owner that did not answer them: they ask it again when it does."""
    view: frozenset[str] = frozenset()
    """The members of the group."""
    views: int = 0
    largest: float = 0.0
    """What was in use at most."""

    def __post_init__(self) -> None:
        self.users = {name: self.new_user(name) for name in self.claims}
        self.processes = {
            name: Process(BudgetOwner(BUDGET, self.guaranteed)) for name in (FIRST, "second")
        }
        self.change_view(frozenset(self.claims), lambda: 0.0)
        self.numbers = itertools.count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        for number, name in enumerate(self.users):
            self.at(number * ASK_EVERY_MS / len(self.users), lambda name=name: self.ask(name))
        for name in self.processes:
            self.look(name)

    def change_view(self, view: frozenset[str], late_ms: Callable[[], float]) -> None:
        """Have others vote; each process hears of it so much later, and of none after a newer."""
        self.view, self.views = view, self.views + 1
        for name, process in self.processes.items():
            follow = partial(self.follow_view, process, self.views, view)
            use = partial(self.when_awake, name, follow)
            if after_ms := late_ms():
                self.at(self.now_ms + after_ms, use)
            else:
                use()

    def follow_view(self, process: Process, number: int, view: frozenset[str]) -> None:
        if number > process.view:
            process.view = number
            process.votes.voters.use(view, self.now_ms)

    def new_user(self, name: str) -> tuple[str, OwnerVote, ActiveLease]:
        return f"{name}#{self.now_ms}", OwnerVote(self.clock_ms(name)), ActiveLease()

    def look(self, owner: str) -> None:
        self.at(self.now_ms + LOOK_EVERY_MS, lambda: self.look(owner))
        if self.frozen_until_ms.get(owner, 0.0) <= self.now_ms:
            self.processes[owner].is_awake(self.now_ms)

    def at(self, at_ms: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (at_ms, next(self.numbers), event))

    def clock_ms(self, name: str) -> float:
        return self.now_ms + self.offsets_ms.get(name, 0.0)

    def run(self, end_ms: float) -> None:
        while self.events and self.events[0][0] <= end_ms:
            self.now_ms, _, event = heapq.heappop(self.events)
            event()
            self.largest = max(self.largest, self.total())
        self.now_ms = end_ms

    def total(self) -> float:
        return math.fsum(self.rates().values())

    def rates(self) -> dict[str, float]:
        return {name: user.rate(self.clock_ms(name)) for name, (*_, user) in self.users.items()}

    def is_frozen(self, name: str) -> bool:
        return self.frozen_until_ms.get(name, 0.0) > self.now_ms

    def when_awake(self, name: str, event: Callable[[], None]) -> None:
        """Do it now, or when a frozen process goes on."""
        awake_ms = self.frozen_until_ms.get(name, 0.0)
        if awake_ms > self.now_ms:
            self.at(awake_ms, lambda: self.when_awake(name, event))
        else:
            event()

    def send(self, event: Callable[[], None]) -> None:
        delay_ms = self.delay_ms()
        if delay_ms is not None:
            self.at(self.now_ms + delay_ms, event)

    def ask(self, name: str) -> None:
        self.at(self.now_ms + ASK_EVERY_MS, lambda: self.ask(name))
        self.when_awake(name, lambda: self.ask_once(name))

    def ask_once(self, name: str) -> None:
        (process_name, vote, user), asked = self.users[name], self.asked.get(name, FIRST)
        if (name, asked) in self.failing and self.is_frozen(asked):
            return
        if not vote.give(asked, self.clock_ms(name)):
            return
        claim, number = self.claims[name], next(self.numbers) + 1
        asked_ms = self.clock_ms(name)
        uses = user.in_use(asked_ms)
        demand = Demand(process_name, number, uses, claim)
        process, until_ms = self.processes[asked], self.now_ms + ASK_LIMIT_MS
        is_open = [True]

        def given_up() -> None:
            """Close the connection, whose messages come no more."""
            if is_open[0]:
                is_open[0] = False
                vote.ended(self.clock_ms(name))
                self.failing.add((name, asked))

        def answer() -> None:
            if not (is_open[0] and process.is_awake(self.now_ms)):
                return
            process.votes.take(name, self.now_ms)
            lease = process.owner.answer(demand, process.votes, self.now_ms)
            self.send(lambda: self.when_awake(name, lambda: take(lease)))

        def take(lease: RateLease | None) -> None:
            if not is_open[0]:
                return
            given_up()
            self.failing.discard((name, asked))
            is_lower = lease is not None and user.take(lease, asked_ms, self.clock_ms(name))
            if is_lower and user is self.users[name][-1]:
                self.ask_once(name)

        self.at(until_ms, lambda: self.when_awake(name, given_up))
        self.send(lambda: self.when_awake(asked, answer))

    def ask_second(self) -> None:
        """Have all members take another one for the owner from now on."""
        self.asked = dict.fromkeys(self.users, "second")


def history(seed: int, members: int) -> Network:
    """Run a random history of losses, delays, doubles, freezes, wishes and owners."""
    rng = random.Random(seed)
    floor = GUARANTEED * BUDGET / 8 / members
    claims = {f"m-{number}": BudgetClaim(1 + number % 3, floor) for number in range(members)}
    lossy, slow = rng.random() * 0.5, rng.random()

    def delay_ms() -> float | None:
        if rng.random() < lossy:
            return None
        return rng.uniform(0.0, LONGEST_DELAY_MS if rng.random() < slow else 50.0)

    net = Network(claims, delay_ms, floor * members)
    for name in claims:
        net.offsets_ms[name] = rng.uniform(-1e6, 1e6)
        net.users[name] = net.new_user(name)
    for _ in range(rng.randrange(40)):
        at_ms, name = rng.uniform(0.0, END_MS), rng.choice(list(claims))
        for_ms, owner = rng.uniform(0.0, LONGEST_DELAY_MS), rng.choice(list(net.processes))
        net.at(
            at_ms,
            rng.choice(
                (
                    lambda n=name, m=for_ms: net.frozen_until_ms.update({n: net.now_ms + m}),
                    lambda o=owner, m=for_ms: net.frozen_until_ms.update({o: net.now_ms + m}),
                    lambda n=name, o=owner: net.asked.update({n: o}),
                    lambda o=owner: net.asked.update(dict.fromkeys(claims, o)),
                    lambda n=name: net.claims.update(
                        {n: BudgetClaim(5, floor, demand=rng.uniform(0, BUDGET))}
                    ),
                    lambda n=name: net.claims.update({n: BudgetClaim(demand=0.0)}),
                    lambda n=name: net.users.update({n: net.new_user(n)}),
                )
            ),
        )
    for _ in range(rng.choice((0, 0, 3, 20))):

        def change_view() -> None:
            """Have one come or go, or any number; those in between may be skipped."""
            some = {rng.choice(list(claims))}
            if rng.random() < 0.3:
                some |= {name for name in claims if rng.random() < 0.5}
            net.change_view(net.view ^ some, lambda: rng.uniform(0.0, SKEW_MS))

        net.at(rng.uniform(0.0, END_MS), change_view)
    net.run(END_MS)
    return net


@given(st.integers(0, 10**9), st.sampled_from([2, 5, 12]))
@example(seed=1, members=50)
def test_leases_never_add_up_to_more_than_the_budget(seed, members):
    assert history(seed, members).largest <= BUDGET * (1 + 1e-9)


def test_histories_in_which_nothing_is_leased_would_prove_nothing():
    used = [history(seed, 5).largest for seed in range(40)]
    assert sum(each >= 0.9 * BUDGET for each in used) >= 12


def test_each_member_gets_what_is_due_to_its_clients():
    claims = {"a": BudgetClaim(3, 60.0), "b": ALL, "c": ALL}
    net = Network(claims)
    net.run(SETTLED_MS)
    due = divide_fairly(BUDGET, [each for claim in claims.values() for each in claim.among({})])
    assert list(net.rates().values()) == pytest.approx(due, rel=0.1)
    assert net.total() >= 0.97 * BUDGET


def test_a_guarantee_takes_nothing_from_the_others_at_its_member():
    """One of 100 is guaranteed 100 of 200: the others share the rest, wherever they are."""
    claims = {
        "a": BudgetClaim(33, own={(1.0, 100.0): 1}),
        "b": BudgetClaim(33),
        "c": BudgetClaim(33),
    }
    net = Network(claims, guaranteed=100.0)
    net.run(2 * SETTLED_MS)
    third = (BUDGET - 100.0) / 3
    due = {"a": 100.0 + third, "b": third, "c": third}
    assert net.rates() == pytest.approx(due, rel=0.1)
    assert claims["a"].lasting == 100.0


def test_clients_with_the_same_guarantee_are_as_many_claims():
    claim = BudgetClaim(0.0, own={(2.0, 10.0): 3}, demand=50.0)
    assert claim.among({}) == {Claim(2.0, 10.0, most=50.0): 3}
    assert BudgetClaim.of(claim.row()) == claim
    assert BudgetClaim.of(claim.row()[:4]) == BudgetClaim(0.0, demand=50.0)
    assert claim.lasting == 30.0


def test_what_one_leaves_others_have_and_give_back():
    net = Network({"a": BudgetClaim(3, 60.0), "b": ALL, "c": ALL})
    net.run(SETTLED_MS)
    net.claims["a"] = BudgetClaim(3, 60.0, demand=0.0)
    net.run(2 * SETTLED_MS)
    assert net.rates() == pytest.approx({"a": 0.0, "b": 100.0, "c": 100.0}, rel=0.1)
    net.claims["a"] = BudgetClaim(3, 60.0)
    net.ask_once("a")
    net.run(2 * SETTLED_MS + 2.1 * ASK_EVERY_MS)
    assert net.rates()["a"] >= 60.0
    net.run(3 * SETTLED_MS)
    assert net.rates()["a"] == pytest.approx(120.0, rel=0.1)


def test_a_member_without_an_owner_keeps_its_guarantee_for_a_while():
    net = Network({"a": BudgetClaim(3, 60.0), "b": ALL}, guaranteed=60.0)
    net.run(SETTLED_MS)
    net.frozen_until_ms[FIRST] = math.inf
    net.run(SETTLED_MS + RATE_LEASE_MS)
    assert net.rates() == {"a": 60.0, "b": 0.0}
    net.run(SETTLED_MS + RATE_LEASE_MS + GUARANTEE_MS)
    assert net.total() == 0.0


def test_what_a_member_had_that_is_gone_is_leased_again():
    net = Network(dict.fromkeys("abc", ALL))
    net.run(SETTLED_MS)
    net.frozen_until_ms["a"] = math.inf
    net.run(SETTLED_MS + RATE_LEASE_MS + SKEW_MS + 2 * ASK_EVERY_MS)
    assert net.rates()["b"] == pytest.approx(BUDGET / 2, rel=0.1)


def test_leases_go_on_when_another_one_is_the_owner():
    net = Network({"a": BudgetClaim(3, 60.0), "b": ALL, "c": ALL}, guaranteed=60.0)
    net.run(SETTLED_MS)
    before = net.rates()
    net.ask_second()
    net.run(SETTLED_MS + VOTE_MS + 3 * ASK_EVERY_MS)
    assert net.total() >= 0.8 * BUDGET
    net.run(2 * SETTLED_MS)
    assert net.rates() == pytest.approx(before, rel=0.1)
    net.claims["b"] = BudgetClaim(demand=0.0)
    net.run(2 * SETTLED_MS + GUARANTEE_MS)
    assert net.total() == pytest.approx(BUDGET, rel=0.03)


@pytest.mark.parametrize("seen_ms", [0.0, 2_500.0], ids=["killed", "frozen"])
def test_what_a_silent_owner_had_leased_is_leased_anew_within_five_seconds(seen_ms):
    """It serves clients of its own, whose part is missing at once."""
    for seed in range(20):
        rng = random.Random(seed)
        net = Network(dict.fromkeys("abc", ALL), lambda rng=rng: rng.uniform(0.2, 3.0))
        silent_ms = 2 * SETTLED_MS + rng.uniform(0.0, 1_000.0)
        net.run(silent_ms)
        net.frozen_until_ms |= dict.fromkeys((FIRST, "a"), math.inf)
        net.run(silent_ms + seen_ms)
        net.ask_second()
        net.run(silent_ms + 5_000.0)
        assert net.rates()["b"] + net.rates()["c"] >= 0.8 * BUDGET


def test_an_owner_of_a_minority_leases_nothing():
    net = Network(dict.fromkeys("abcde", ALL))
    net.run(SETTLED_MS)
    net.asked = {"a": "second", "b": "second"}
    net.run(2 * SETTLED_MS)
    assert net.rates() == pytest.approx(
        {"a": 0, "b": 0, **dict.fromkeys("cde", BUDGET / 3)}, rel=0.1
    )
    net.asked["c"] = "second"
    net.run(3 * SETTLED_MS)
    assert net.rates() == pytest.approx(
        {**dict.fromkeys("abc", BUDGET / 3), "d": 0, "e": 0}, rel=0.1
    )


def test_an_owner_that_stood_still_asks_for_votes_anew():
    net = Network(dict.fromkeys("abc", ALL))
    net.run(SETTLED_MS)
    net.frozen_until_ms[FIRST] = net.now_ms + 3_000.0
    net.ask_second()
    net.run(SETTLED_MS + VOTE_MS + ASK_LIMIT_MS + 2 * ASK_EVERY_MS)
    assert net.total() >= 0.8 * BUDGET
    assert net.largest <= BUDGET * (1 + 1e-9)


def test_a_member_uses_no_lease_that_is_earlier_than_the_one_before():
    user, first, second = ActiveLease(), 1, 2
    assert not user.take(RateLease(second, 5.0, 1.0), 10.0, 10.0)
    assert not user.take(RateLease(first, 50.0, 1.0), 0.0, 10.0)
    assert user.rate(10.0) == 5.0
    assert user.rate(10.0 + RATE_LEASE_MS) == 1.0
    assert user.rate(10.0 + RATE_LEASE_MS + GUARANTEE_MS) == 0.0


def test_a_member_asks_another_owner_when_its_vote_is_over():
    vote = OwnerVote(0.0)
    assert not vote.give("o", 1.0)
    assert vote.give("o", VOTE_MS)
    vote.ended(VOTE_MS + 5.0)
    assert not vote.give("p", 2 * VOTE_MS)
    assert vote.give("p", 2 * VOTE_MS + 5.0)


def votes_of(member: str, at_ms: float) -> ReceivedVotes:
    votes = ReceivedVotes(VoterSet())
    votes.voters.use(frozenset(member), at_ms - VOTE_MS)
    votes.take(member, at_ms)
    return votes


def test_a_demand_that_comes_twice_or_late_is_answered_once():
    owner, votes = BudgetOwner(BUDGET, 0.0), votes_of("a", 20.0)
    first, second = (Demand("a", number, NO_LEASE, ALL) for number in (1, 2))
    assert owner.answer(second, votes, 20.0) == RateLease(second.number, BUDGET, 0.0)
    assert owner.answer(second, votes, 30.0) is None
    assert owner.answer(first, votes, 30.0) is None


def test_an_owner_forgets_what_nobody_uses_any_more_and_not_before():
    owner = BudgetOwner(BUDGET, 5.0)
    lease = owner.answer(
        Demand("a", 1, NO_LEASE, BudgetClaim(guaranteed=5.0)), votes_of("a", 0.0), 0.0
    )
    assert lease == RateLease(1, BUDGET, 5.0)
    over_ms = RATE_LEASE_MS + SKEW_MS + GUARANTEE_MS
    assert not owner.is_idle(over_ms - 1.0)
    assert owner.is_idle(over_ms)


def test_in_the_place_of_another_rule_no_more_is_leased_at_first_than_members_say_to_use():
    owner = BudgetOwner(BUDGET, 0.0, free_ms=1_000.0)
    used = RateLease(1, 50.0, 0.0)
    for number, uses, at_ms, rate in (
        (1, NO_LEASE, 0.0, 0.0),
        (2, used, 500.0, 50.0),
        (3, used, 1_000.0, BUDGET),
    ):
        lease = owner.answer(Demand("a", number, uses, ALL), votes_of("a", at_ms), at_ms)
        assert lease is not None
        assert lease.rate == rate


def test_a_majority_that_had_ended_begins_anew_with_the_vote_that_makes_one():
    votes = votes_of("a", 0.0)
    votes.take("a", RATE_LEASE_MS + 1.0)
    assert votes.free_ms == RATE_LEASE_MS + 1.0
