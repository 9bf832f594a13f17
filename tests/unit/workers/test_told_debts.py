"""What a worker has told of debts is worked off while nobody serves its clients."""

from proxy.quota.debts import Debt
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.workers.shared_keys import debt_row, read_debt
from proxy.workers.told_debts import ToldDebts


def row(name: str, owed_ms: float) -> list[object]:
    client = ClientIdentity("main", None, name)
    return debt_row(Debt(client, f"client-id={name}", QuotaKind.CONSUMER_BYTE_RATE, owed_ms))


def test_what_is_left() -> None:
    now_s = [5.0]
    told = ToldDebts(lambda: now_s[0])
    assert told.left() == []
    told.tell([row("a", 3000.0), row("b", 1000.0)])
    assert told.left() == [row("a", 3000.0), row("b", 1000.0)]
    now_s[0] += 1.0
    assert told.left() == [row("a", 2000.0)]
    assert [read_debt(each).identity.client_id for each in told.left()] == ["a"]
    told.tell([])
    assert told.left() == []
