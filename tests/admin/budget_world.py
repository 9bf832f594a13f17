"""A world in which clients share a budget, and some of them wait for it."""

from admin_world import CONSUMER, HOSTILE, MIB, PRODUCER, AdminWorld

from proxy.quota.gate import GateWaiter
from proxy.quota.rules import Budget, Rule, Share

ANALYTICS = Budget(name="analytics", bounds={CONSUMER: 200 * MIB}, place="quota-proxy.yaml:9")
ADHOC = Budget(name="adhoc", bounds={}, share=Share(ANALYTICS), number=1)
RULES = (
    Rule(
        client_id="etl-orders",
        bounds={CONSUMER: 150 * MIB},
        share=Share(ANALYTICS, 3.0, 60 * MIB),
        place="quota-proxy.yaml:12",
    ),
    Rule(client_id_prefix="notebook-", bounds={}, share=Share(ADHOC), number=1),
    Rule(client_id="plain", bounds={CONSUMER: 10 * MIB, PRODUCER: MIB}, number=2),
)
NOTEBOOKS = ("notebook-a", f"notebook-{HOSTILE}")


class BudgetWorld(AdminWorld):
    """A second after etl-orders took little, and two notebooks so much that both wait."""

    def __init__(self) -> None:
        super().__init__(RULES)
        self.connect("etl-orders")(330 * MIB)
        self.connect("plain")(MIB)
        for name in NOTEBOOKS:
            client = self.client_quotas(name)
            client.charge(CONSUMER, 2100 * MIB, self.now_ms)
        for name in NOTEBOOKS:
            client = self.client_quotas(name)
            for _ in range(2):
                waiter = GateWaiter(lambda _: None)
                assert not client.admit(CONSUMER, waiter, 1_000_000, self.now_ms, holds=True)
        self.now_ms += 1_000.0
