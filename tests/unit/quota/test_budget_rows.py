"""What rows show of budgets and their clients, on virtual time."""

from types import SimpleNamespace

import pytest
from closed_loop import CONSUMER, MB, PRODUCER
from parts.quota_world import QuotaWorld, shown_figure
from parts.sensor_views import views
from test_budgets import ADHOC, ANALYTICS, END_MS, RATE, World, etl, rule

from proxy.admin.client_documents import BUDGET
from proxy.admin.document_models import RowContext
from proxy.admin.sensor_rows import BudgetShareCalculator, rows_by_client
from proxy.quota.entities import ClientIdentity
from proxy.quota.rules import Budget, QuotaManagerSettings, QuotaPause, Rule, RuleTable, Share

NEAR = {"rel": 0.05}
SMALL = 60_000
"""Of answers: so little that one connection moves 27 MB/s at most."""
ASKED_MS = 7.0
"""Later a client with one connection has asked, and does not wait for its turn at that moment."""


class Rows:
    """What is shown of a world now."""

    def __init__(self, world):
        def clock_ms():
            return world.loop.now_ms

        shares = BudgetShareCalculator()
        self.all = list(views(rows_by_client(world.quotas, clock_ms, shares), clock_ms))
        self.by_client = {
            row.entity.partition("=")[2]: row for row in self.all if row.kind is CONSUMER
        }
        rows = shares.rows(world.quotas.table.budgets, world.quotas.by_name)
        now = RowContext(0.0, world.loop.now_ms)
        shown = [SimpleNamespace(**BUDGET.document(row, now)) for row in rows]
        self.budgets = {row.name: row for row in shown if row.quota == CONSUMER}

    def parts(self, name):
        """Return of each client a figure in MB per second."""
        return {client: getattr(row.part, name) / MB for client, row in self.by_client.items()}

    def part(self, client):
        return self.by_client[client].part


def shown(*rules, reads, until_ms=END_MS, **settings):
    """Return the rows after clients have read for a while: connections, or connections and size."""
    world = World(*rules, **settings)
    for name, how in reads.items():
        world.reads(name, *(how if isinstance(how, tuple) else (how,)))
    world.loop.run(until_ms)
    return Rows(world)


def test_backlogged_clients_have_their_shares_and_wait_for_their_turns():
    rows = shown(etl(), rule("n1"), rule("n2"), reads={"etl": 8, "n1": 16, "n2": 4})
    assert rows.parts("fair_share") == pytest.approx({"etl": 120, "n1": 40, "n2": 40})
    rates = {client: row.rate / MB for client, row in rows.by_client.items()}
    assert rates == pytest.approx({"etl": 120, "n1": 40, "n2": 40}, **NEAR)
    for name in ("borrowed", "lent"):
        assert max(rows.parts(name).values()) < 0.05 * 120
    part = rows.part("etl")
    assert (part.budget, part.weight) == ("analytics", 3)
    assert (part.guaranteed, part.ceiling) == (60 * MB, 150 * MB)
    assert rows.part("n1").ceiling == RATE
    assert rows.part("n1").waits_for == "waits for its turn in budget analytics, with 2 others"


def test_who_wants_less_lends_and_the_others_borrow():
    reads = {"etl": (1, SMALL), "n1": 8, "n2": 8}
    rows = shown(etl(), rule("n1"), rule("n2"), reads=reads, until_ms=END_MS + ASKED_MS)
    assert rows.part("etl").lent == pytest.approx(120 * MB - rows.by_client["etl"].rate)
    assert rows.part("etl").borrowed == 0
    assert rows.part("etl").waits_for is None
    assert rows.parts("borrowed")["n1"] == pytest.approx(46, rel=0.1)
    assert rows.part("n1").lent == 0
    assert rows.part("n1").waits_for == "waits for its turn in budget analytics, with 1 other"


@pytest.mark.parametrize(("reads", "lent"), [(16, 60), ((1, SMALL), 0)])
def test_who_is_idle_lends_what_it_is_guaranteed_to_those_who_use_it(reads, lent):
    world = World(etl(), rule("n1"))
    world.reads("etl", until_ms=500.0)
    world.reads("n1", *(reads if isinstance(reads, tuple) else (reads,)))
    world.loop.run(END_MS)
    rows = Rows(world)
    assert rows.by_client["etl"].rate == 0
    assert rows.part("etl").lent == pytest.approx(lent * MB, **NEAR)


def test_nothing_is_lent_where_nobody_wants_it():
    rows = shown(etl(), rule("n1"), reads={"etl": (1, SMALL), "n1": (1, SMALL)})
    assert rows.part("etl").fair_share == pytest.approx(150 * MB)
    assert rows.parts("lent") == {"etl": 0, "n1": 0}
    assert rows.part("n1").waits_for is None


def test_who_is_alone_waits_for_its_budget_only():
    rows = shown(rule("n1"), rule("n2"), reads={"n1": 16})
    assert rows.part("n1").fair_share == RATE
    assert rows.part("n1").waits_for == "waits for its turn in budget analytics"
    assert list(rows.by_client) == ["n1"]


def test_who_waits_since_another_one_lives_by_its_guarantee_is_told_so():
    names = [f"n{number}" for number in range(12)]
    rows = shown(etl(), *map(rule, names), reads=dict.fromkeys(("etl", *names), 4))
    assert rows.parts("fair_share") == pytest.approx({"etl": 60, **dict.fromkeys(names, 140 / 12)})
    words = "waits for etl, which has 57.22 MiB/s guaranteed"
    assert {rows.part(name).waits_for for name in names} == {words}
    assert rows.part("etl").waits_for == "waits for its turn in budget analytics, with 12 others"


def test_a_guarantee_that_is_not_used_is_not_waited_for():
    names = [f"n{number}" for number in range(12)]
    reads = {"etl": (1, 10_000), **dict.fromkeys(names, 4)}
    rows = shown(etl(), *map(rule, names), reads=reads)
    words = "waits for its turn in budget analytics, with 11 others"
    assert {rows.part(name).waits_for for name in names} == {words}


def test_connections_that_wait_at_a_budgets_gate_are_counted():
    """Who has no bound of its own waits nowhere else."""
    reads = {"etl": 8, "n1": 16, "n2": 2}
    rows = shown(etl(), rule("n1"), rule("n2", ceiling=5), reads=reads)
    waiting = {client: row.waiting for client, row in rows.by_client.items()}
    assert waiting["n1"] > 0
    assert rows.by_client["n2"].waiting <= 2
    assert rows.budgets["analytics"].waiting == waiting["etl"] + waiting["n1"]


def test_a_bound_of_its_own_is_no_wait_for_the_budget():
    rows = shown(rule("n1", ceiling=5), reads={"n1": 32})
    assert rows.by_client["n1"].waiting > 0
    assert rows.part("n1").waits_for is None
    assert rows.budgets["analytics"].waiting == 0


def test_budgets_in_budgets():
    rules = (etl(), rule("n1", budget=ADHOC), rule("n2", 3, budget=ADHOC), rule("idle"))
    rows = shown(*rules, reads={"etl": 8, "n1": 8, "n2": 8})
    assert rows.parts("fair_share") == pytest.approx({"etl": 150, "n1": 12.5, "n2": 37.5})
    assert rows.part("n1").budget == "adhoc"
    analytics, adhoc = rows.budgets["analytics"], rows.budgets["adhoc"]
    assert list(rows.budgets) == ["analytics", "adhoc"]
    assert (analytics.bound, adhoc.bound) == (RATE, RATE)
    assert (analytics.guaranteed, adhoc.guaranteed) == (60 * MB, 0)
    assert (analytics.active_clients, adhoc.active_clients) == (3, 2)
    assert analytics.rate == pytest.approx(RATE, rel=0.02)
    assert adhoc.rate == pytest.approx(50 * MB, **NEAR)
    of_adhoc = rows.by_client["n1"].waiting + rows.by_client["n2"].waiting
    assert 0 < of_adhoc == adhoc.waiting <= analytics.waiting
    assert "waits for its turn in budget analytics" in rows.part("n1").waits_for


def test_an_inner_budget_with_a_bound_divides_no_more_than_that():
    adhoc = Budget(name="adhoc", bounds={CONSUMER: 30 * MB}, share=Share(ANALYTICS))
    rows = shown(
        *(etl(), rule("n1", budget=adhoc), rule("n2", budget=adhoc)),
        reads={"etl": 8, "n1": 8, "n2": 8},
    )
    assert rows.parts("fair_share") == pytest.approx({"etl": 150, "n1": 15, "n2": 15})
    assert rows.part("n1").waits_for == "waits for its turn in budget adhoc, with 1 other"


def test_the_guarantee_of_a_budget_is_waited_for_by_clients_beside_it():
    adhoc = Budget(name="adhoc", bounds={}, share=Share(ANALYTICS, 1.0, 120 * MB))
    rows = shown(
        *(rule("q", guaranteed=120, budget=adhoc), rule("n1"), rule("n2")),
        reads={"q": 8, "n1": 8, "n2": 8},
    )
    assert rows.parts("fair_share") == pytest.approx({"q": 120, "n1": 40, "n2": 40})
    words = "waits for budget adhoc, which has 114.4 MiB/s guaranteed"
    assert rows.part("n1").waits_for == words


def test_paused_clients_have_no_share():
    rules = (etl(), rule("n1"), rule("n2"))
    world = World(*rules)
    pauses = [QuotaPause({"client-id": "n2"}, until_s=1e12)]
    world.quotas.update(QuotaManagerSettings(rules=rules), RuleTable(rules, pauses=pauses))
    for name in ("etl", "n1", "n2"):
        world.reads(name, 4)
    world.loop.run(END_MS)
    rows = Rows(world)
    assert rows.part("n1").fair_share == pytest.approx(50 * MB)
    assert rows.part("n2").budget == "analytics"
    assert rows.part("n2").fair_share is None
    assert rows.budgets["analytics"].active_clients == 2


def test_who_moves_nothing_for_the_window_has_no_share():
    world = World(rule("n1"), rule("n2"))
    world.reads("n1", until_ms=1_000.0)
    world.reads("n2")
    world.loop.run(END_MS + 2_000.0)
    rows = Rows(world)
    assert rows.part("n1").fair_share is None
    assert rows.part("n2").fair_share == RATE


def test_a_budget_that_is_not_enforced_is_shown_so():
    seen = Budget(name="seen", bounds={CONSUMER: 10 * MB}, enforce=False)
    rows = shown(rule("n1", budget=seen), rule("n2", budget=seen), reads={"n1": 1, "n2": 1})
    row = rows.budgets["seen"]
    assert not row.enforced
    assert row.rate > 100 * MB
    assert row.active_clients == 2
    assert rows.part("n1").fair_share == pytest.approx(5 * MB)
    assert rows.part("n1").borrowed > 50 * MB


def test_a_client_without_a_budget_has_no_part():
    plain = Rule(client_id="p", bounds={CONSUMER: 50 * MB})
    rows = shown(plain, rule("n1"), reads={"p": 1, "n1": 1})
    assert rows.part("p") is None
    assert rows.part("n1").budget == "analytics"


def test_each_direction_is_by_itself():
    world = World(etl(), rule("n1"))
    world.reads("etl", 8)
    world.writes("n1")
    world.loop.run(END_MS)
    parts = {(row.entity, row.kind): row.part for row in Rows(world).all}
    assert parts["client-id=etl", CONSUMER].fair_share == 150 * MB
    assert parts["client-id=n1", PRODUCER].fair_share == RATE


def test_budgets_are_shown_before_they_have_clients():
    rows = Rows(World(etl(), rule("n1", budget=ADHOC)))
    row = rows.budgets["analytics"]
    figures = row.bound, row.rate, row.guaranteed, row.active_clients, row.waiting, row.enforced
    assert figures == (RATE, 0, 60 * MB, 0, 0, True)
    assert list(rows.budgets) == ["analytics", "adhoc"]


def test_client_ids_of_one_user_have_one_share():
    world = World(rule("n1"), Rule(user="anna", bounds={}, share=Share(ANALYTICS)))
    world.reads("n1", 4)
    world.loop.run(END_MS / 2)
    for number in range(6):
        client = world.quotas.client(ClientIdentity("l", "anna", f"x{number}"))
        client.charge(CONSUMER, 1_000_000, END_MS / 2)
    rows = Rows(world)
    assert rows.part("n1").fair_share == rows.part("anna").fair_share == RATE / 2
    assert rows.budgets["analytics"].active_clients == 2


def test_ten_thousand_clients_are_divided_for_together():
    world = World(Rule(client_id_prefix="x", bounds={}, share=Share(ANALYTICS)), etl())
    for number in range(10_000):
        client = world.quotas.client(ClientIdentity("l", None, f"x{number}"))
        client.charge(CONSUMER, 1.0, 0.0)
    world.quotas.client(ClientIdentity("l", None, "etl")).charge(CONSUMER, 1.0, 0.0)
    rows = Rows(world)
    assert rows.part("etl").fair_share == 60 * MB
    assert rows.part("x9999").fair_share == pytest.approx(140 * MB / 10_000)
    assert rows.budgets["analytics"].active_clients == 10_001


def test_what_clients_are_guaranteed_is_a_metric():
    world = QuotaWorld(etl(), rule("n1"))

    def guaranteed(client_id):
        return shown_figure(world.quotas, "guaranteed_bytes", f"client-id={client_id}")

    for name in ("etl", "n1"):
        world.client_quotas(name).charge(CONSUMER, 1.0, 0.0)
    assert (guaranteed("etl"), guaranteed("n1")) == (60 * MB, None)
    world.quotas.update(QuotaManagerSettings(rules=(Rule(client_id="etl", bounds={CONSUMER: MB}),)))
    world.client_quotas("etl").charge(CONSUMER, 1.0, 1.0)
    assert guaranteed("etl") is None
