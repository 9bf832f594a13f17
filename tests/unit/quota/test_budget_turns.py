"""Groups with weights and guarantees on a link in virtual time, against water filling."""

import random
from dataclasses import dataclass, field

import pytest

from proxy.quota.shares import Claim, divide_fairly
from proxy.quota.turns import TurnNode, TurnPath, Turns

LINK = 200.0
"""MB/s."""

BYTES_PER_MS = 1000.0
"""Of one MB/s."""

SETTLED_MS, END_MS = 2_000.0, 12_000.0
SIZES = {
    "small": lambda _: 50_000,
    "large": lambda _: 2_000_000,
    "mixed": lambda rng: rng.choice((50_000, 500_000, 2_000_000)),
}


@dataclass
class Backlogged:
    """A client that always has requests waiting, on all of its connections."""

    path: TurnPath
    connections: int = 1
    got: float = 0.0


@dataclass
class Link:
    """Serves one answer after the other, at its rate."""

    clients: dict[str, Backlogged]
    size: object
    turns: Turns[tuple[str, int]] = field(default_factory=Turns)
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    now_ms: float = 0.0

    def run(self, end_ms: float) -> None:
        if not self.now_ms:
            for name, client in self.clients.items():
                for number in range(client.connections):
                    self.join(name, number)
        while self.now_ms < end_ms:
            waiter = self.turns.first(self.now_ms)
            assert waiter is not None
            client = self.clients[waiter[0]]
            size = self.size(self.rng)
            self.turns.leave(waiter, client.path, self.now_ms, size)
            if self.now_ms >= SETTLED_MS:
                client.got += size
            self.now_ms += size / LINK / BYTES_PER_MS
            self.join(*waiter)  # with its next request

    def join(self, name: str, number: int) -> None:
        self.turns.join((name, number), self.clients[name].path, self.size(self.rng), self.now_ms)

    def rates(self) -> dict[str, float]:
        """MB/s of each client since it has settled."""
        passed_ms = self.now_ms - SETTLED_MS
        return {name: each.got / passed_ms / BYTES_PER_MS for name, each in self.clients.items()}


def client(name: str, claim: Claim, *within: TurnNode, connections: int = 1) -> Backlogged:
    step = TurnNode(name, claim.weight, claim.guaranteed * BYTES_PER_MS)
    return Backlogged((*within, step), connections)


ETL = Claim(weight=3, guaranteed=60)


@pytest.mark.parametrize("notebooks", [1, 2, 6, 12, 100])
@pytest.mark.parametrize("kind", SIZES)
def test_each_gets_its_weighted_max_min_share(kind, notebooks):
    claims = {"etl": ETL, **{f"n-{number}": Claim() for number in range(notebooks)}}
    link = Link({name: client(name, claim) for name, claim in claims.items()}, SIZES[kind])
    link.run(END_MS)
    due = dict(zip(claims, divide_fairly(LINK, list(claims.values())), strict=True))
    turn = 2_000_000 / (END_MS - SETTLED_MS) / BYTES_PER_MS
    for name, rate in link.rates().items():
        assert rate == pytest.approx(due[name], rel=0.05, abs=2 * turn), name


def test_connections_are_no_shares():
    clients = {"one": client("one", Claim()), "many": client("many", Claim(), connections=16)}
    link = Link(clients, SIZES["mixed"])
    link.run(END_MS)
    assert link.rates()["one"] == pytest.approx(LINK / 2, rel=0.02)


def test_a_group_in_a_group_is_one_of_its_members():
    adhoc = TurnNode("adhoc", 1.0)
    clients = {
        "etl": client("etl", ETL),
        **{f"n-{number}": client(f"n-{number}", Claim(), adhoc) for number in range(12)},
        "vip": client("vip", Claim(guaranteed=10), adhoc),
    }
    link = Link(clients, SIZES["small"])
    link.run(END_MS)
    rates = link.rates()
    assert rates["etl"] == pytest.approx(LINK * 3 / 4, rel=0.02)
    assert rates["vip"] == pytest.approx(10, rel=0.05)
    assert rates["n-3"] == pytest.approx((LINK / 4 - 10) / 12, rel=0.05)


def test_who_comes_back_has_its_guarantee_within_a_second():
    """While it was away the others had all; so it is when the others go."""
    clients = {f"n-{number}": client(f"n-{number}", Claim()) for number in range(12)}
    link = Link(clients, SIZES["large"])
    link.run(SETTLED_MS)
    clients["etl"] = client("etl", ETL)
    link.join("etl", 0)
    link.run(SETTLED_MS + 1_000)
    assert clients["etl"].got / 1e6 >= 0.95 * 60
    for name in list(clients):
        if name not in ("etl", "n-0"):
            link.turns.leave((name, 0), clients.pop(name).path, link.now_ms)
    clients["etl"].got = 0.0
    begin_ms = link.now_ms
    link.run(begin_ms + 1_000)
    assert clients["etl"].got / 1e6 >= 0.9 * LINK * 3 / 4


def test_a_newcomers_small_answer_does_not_wait_for_many_large_ones():
    clients = {
        f"n-{number}": client(f"n-{number}", Claim(), connections=16) for number in range(100)
    }
    link = Link(clients, SIZES["large"])
    link.run(SETTLED_MS)
    path = (TurnNode("new"),)
    link.turns.join(("new", 0), path, 50_000, link.now_ms)
    begin_ms = link.now_ms
    while (waiter := link.turns.first(link.now_ms)) != ("new", 0):
        link.turns.leave(waiter, clients[waiter[0]].path, link.now_ms, 2_000_000)
        link.now_ms += 2_000_000 / LINK / BYTES_PER_MS
        link.join(*waiter)
    assert link.now_ms - begin_ms <= 100
