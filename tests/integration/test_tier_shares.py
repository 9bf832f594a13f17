"""Weights and guarantees of clients that are at several members: each has what is due to it."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.machine import told_port
from support.proxy_process import until
from support.tier import SETTLED_S, TierMachine, owner_of, serving, tier_config
from test_tier_budgets import LONG_S, MOST, RATE, Reader, most_in, shares_of, write_batches

from examples.devkit.broker import EmbeddedBroker
from proxy.quota.shares import Claim, divide_fairly
from proxy.tier.slot_map import SLOTS

NAMES = ("a", "b", "c")
CLAIMS = {
    "heavy": Claim(weight=3),
    "kept": Claim(guaranteed=0.3),
    "light": Claim(weight=0.5),
    **{f"plain-{number}": Claim() for number in range(6)},
}
"""In parts of what they share."""
CONNECTIONS = {"heavy": 2, "kept": 2, "light": 8, "plain-0": 8, "plain-1": 8}
"""One for the others."""
LEAVING = ("heavy", "plain-0")
LATELY_S = 5.0
NEAR = 0.15
"""A lease stays as it is while it is less than 10 % too large."""


class Following(Reader):
    """Goes where it is sent when its connection ends: its slot may move."""

    @property
    def port(self) -> int:
        return told_port(self.machine, self.client_id)


def rule_of(name: str, claim: Claim) -> dict[str, Any]:
    rule = {"client-id": name, "budget": "link", "weight": claim.weight}
    return {**rule, "guaranteed": int(claim.guaranteed * RATE)} if claim.guaranteed else rule


@pytest.fixture
def machines(kafka: EmbeddedBroker, tmp_path: Path) -> Iterator[list[TierMachine]]:
    quotas = {
        "budgets": [{"name": "link", "consumer_byte_rate": RATE}],
        "rules": [rule_of(name, claim) for name, claim in CLAIMS.items()],
    }
    made = [
        TierMachine(tier_config(kafka.bootstrap, "shares", name, quotas=quotas), tmp_path / name)
        for name in NAMES
    ]
    with serving(made, least=SLOTS // 10):
        yield made


def test_clients_at_all_members_have_their_weights_and_guarantees(
    machines: list[TierMachine], kafka: EmbeddedBroker, topic: Callable[..., str]
) -> None:
    """However many connections each has, and also when some of them leave theirs to the others."""
    name = topic()
    write_batches(kafka.bootstrap, name)
    readers: dict[str, list[Reader]] = {}

    def have_their_shares(*names: str) -> bool:
        shares = shares_of(readers, LATELY_S)
        due = divide_fairly(1.0, [CLAIMS[name] for name in names])
        return all(
            abs(shares[name] / share - 1) < NEAR for name, share in zip(names, due, strict=True)
        )

    with ExitStack() as stack:
        owners = {client_id: owner_of(machines, client_id) for client_id in CLAIMS}
        assert len(set(owners.values())) == len(NAMES)
        for client_id, owner in owners.items():
            made = (Following(owner, client_id, name) for _ in range(CONNECTIONS.get(client_id, 1)))
            readers[client_id] = [stack.enter_context(reader) for reader in made]
        time.sleep(LATELY_S)
        until(lambda: have_their_shares(*CLAIMS), "each has its share", SETTLED_S)
        for client_id in LEAVING:
            for reader in readers[client_id]:
                reader.ended.set()
        left = [client_id for client_id in CLAIMS if client_id not in LEAVING]
        until(lambda: have_their_shares(*left), "the others have what two left", SETTLED_S)
        every = [reader for each in readers.values() for reader in each]
    assert most_in(every, LONG_S) <= MOST
