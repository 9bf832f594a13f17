"""What a worker has told of debts is worked off while nobody serves its clients."""

from proxy.quota.debts import Debt
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.workers.told_debts import ToldDebts


def debt(name: str, owed_ms: float, held_ms: float = 0.0) -> Debt:
    client = ClientIdentity("main", None, name)
    return Debt(client, f"client-id={name}", QuotaKind.CONSUMER_BYTE_RATE, owed_ms, held_ms)


def test_what_is_left() -> None:
    now_s = [5.0]
    told = ToldDebts(lambda: now_s[0])
    assert told.left() == []
    told.tell([debt("a", 3000.0, 1500.0).document(), debt("b", 1000.0).document()])
    assert told.left() == [debt("a", 3000.0, 1500.0), debt("b", 1000.0)]
    now_s[0] += 1.0
    assert told.left() == [debt("a", 2000.0, 500.0)]
    now_s[0] += 1.0
    assert told.left() == [debt("a", 1000.0)]
    told.tell([])
    assert told.left() == []
