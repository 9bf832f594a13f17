"""Rules and budgets that are in force at some times only."""

from datetime import UTC, datetime

from parts.at_once import at_once
from parts.quota_world import QuotaWorld

from proxy.config.check_report import explain_out_of_force
from proxy.quota.entities import ClientIdentity, QuotaKind
from proxy.quota.rule_registry import RuleRegistry, make_override
from proxy.quota.rules import AdaptiveSettings, Budget, QuotaManagerSettings, Rule, Share
from proxy.quota.scheduled_rules import ScheduledSettings
from proxy.quota.schedules import Schedule
from proxy.state import MemoryStore

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
MB = 1e6
HOUR_S = 3600.0
ETL = {"client-id": "etl"}

WORKING = Schedule(("mon-fri",), "08:00", "18:00", "Europe/Berlin")
NIGHT = Schedule(("mon-sun",), "22:00", "06:00", "Europe/Berlin")
DAY_S = datetime(2026, 11, 26, 12, tzinfo=UTC).timestamp()  # a Thursday, at 13:00 in Berlin
EVENING_S = datetime(2026, 11, 26, 17, tzinfo=UTC).timestamp()  # at 18:00
NIGHT_S = datetime(2026, 11, 26, 21, tzinfo=UTC).timestamp()  # at 22:00


def rule(number, bound=None, when=None, name="etl", **more):
    bounds = {} if bound is None else {CONSUMER: bound * MB}
    return Rule(client_id=name, bounds=bounds, number=number, when=when, **more)


THREE = (rule(0, 3), rule(1, 1, WORKING), rule(2, 2, NIGHT))


class Scheduled(QuotaWorld):
    """Rules of a file, as a process has them in force."""

    def __init__(self, *rules, now_s=DAY_S, **settings):
        settings = QuotaManagerSettings(rules=rules, **settings)
        self.open_quotas(settings)
        self.registry = RuleRegistry(self.quotas, MemoryStore(), settings, now_s=now_s)

    def pass_to(self, now_s):
        at_once(self.registry.end_due(now_s))

    def bound(self, name="etl"):
        """The most that a client can have, in MB per second."""
        match = self.quotas.table.match(CONSUMER, ClientIdentity("l", None, name))
        return match.rule.ceilings[CONSUMER] / MB if match else None

    def listed(self):
        entries = self.registry.composed.entries
        return [(entry.rule.number, str(entry.source), entry.in_force) for entry in entries]


def test_a_rule_with_a_schedule_goes_first_in_its_time():
    world = Scheduled(*THREE)
    assert world.bound() == 1
    for now_s, bound in (
        (EVENING_S - 0.001, 1),
        (EVENING_S, 3),
        (NIGHT_S - 0.001, 3),
        (NIGHT_S, 2),
        (NIGHT_S + 8 * HOUR_S, 3),
        (NIGHT_S + 10 * HOUR_S, 1),
        (DAY_S + 48 * HOUR_S, 3),  # on Saturday
        (EVENING_S, 3),  # the clock was set back
        (DAY_S, 1),
    ):
        world.pass_to(now_s)
        assert world.bound() == bound, now_s


def test_what_is_not_in_force_is_listed_behind_what_is():
    world = Scheduled(*THREE)
    assert world.listed() == [(1, "file", True), (0, "file", False), (2, "file", False)]
    world.pass_to(EVENING_S)
    assert world.listed() == [(0, "file", True), (1, "file", False), (2, "file", False)]
    assert world.registry.composed.of_file.scheduled == {"rule 1": False, "rule 2": False}


def test_a_rule_alone_is_as_if_it_were_not_there_at_other_times():
    world = Scheduled(rule(0, 1, WORKING))
    world.pass_to(EVENING_S)
    assert world.bound() is None
    assert (world.listed(), world.registry.composed.in_force) == ([(0, "file", False)], {})


def test_nothing_is_composed_anew_where_nothing_changes():
    world = Scheduled(*THREE)
    generation = world.quotas.generation
    world.pass_to(EVENING_S - 1)
    assert world.quotas.generation == generation
    world.pass_to(EVENING_S)
    world.pass_to(EVENING_S + 1)
    assert world.quotas.generation == generation + 1


def test_what_was_measured_stays_over_a_change():
    world = Scheduled(*THREE)
    client = world.client_quotas("etl")
    client.charge(CONSUMER, 100 * MB, 0.0)
    world.pass_to(EVENING_S)
    assert client.charge(CONSUMER, MB, 1000.0) is not None
    assert [row.rule.number for row in world.rows(1000.0)] == [0]


def test_an_override_is_in_force_at_all_times_and_gets_what_it_leaves_open_by_the_rule_in_force():
    world = Scheduled(rule(0, 1, WORKING, adaptive=AdaptiveSettings(), expected=True))
    at_once(world.registry.put(make_override(ETL, {CONSUMER: 9 * MB})))
    (entry,) = world.registry.composed.in_force.values()
    assert (world.bound(), entry.rule.expected) == (9, True)
    world.pass_to(EVENING_S)
    (entry,) = world.registry.composed.in_force.values()
    assert (world.bound(), entry.rule.expected) == (9, False)
    assert at_once(world.registry.delete(ETL))
    assert world.bound() is None


def test_a_reload_goes_by_the_time_of_the_last_tick():
    world = Scheduled(*THREE)
    world.pass_to(EVENING_S)
    at_once(world.registry.use_file(QuotaManagerSettings(rules=(rule(0, 7), rule(1, 5, WORKING)))))
    assert world.bound() == 7


def test_a_budget_does_not_bound_outside_of_its_time():
    budget = Budget(name="all", bounds={CONSUMER: 9 * MB}, when=WORKING)
    world = Scheduled(
        rule(0, 5, name="a", share=Share(budget, 2.0, 4 * MB)),
        rule(1, name="b", share=Share(budget)),
        rule(2, 12, name="c", share=Share(budget)),
    )
    assert [world.bound(name) for name in "abc"] == [5, 9, 9]
    assert [(each.rule, each.in_force) for each in world.registry.composed.budgets] == [
        (budget, True)
    ]
    world.pass_to(EVENING_S)
    assert [world.bound(name) for name in "abc"] == [5, None, 12]
    assert [rule.share for rule in world.quotas.table.rules] == [None, None]
    assert [(each.rule, each.in_force) for each in world.registry.composed.budgets] == [
        (budget, False)
    ]
    world.pass_to(NIGHT_S + 10 * HOUR_S)
    assert [world.bound(name) for name in "abc"] == [5, 9, 9]


def test_a_rule_without_a_bound_leaves_its_clients_to_one_that_has_one():
    budget = Budget(name="all", bounds={CONSUMER: 9 * MB}, when=WORKING)
    every_day = Schedule(("mon-sun",), "00:00", "20:00")
    world = Scheduled(rule(0, when=every_day, share=Share(budget)), rule(1, 7))
    assert world.bound() == 9
    world.pass_to(EVENING_S)
    assert world.bound() == 7
    settings = QuotaManagerSettings(
        rules=(rule(0, when=every_day, share=Share(budget)), rule(1, 7))
    )
    first, _ = explain_out_of_force(settings, EVENING_S)
    assert first.startswith("rule 0 is not in force at 2026-11-26T17:00Z: no budget")


def test_a_budget_in_a_budget_stays_in_it_without_its_own_rate():
    outer = Budget(name="outer", bounds={CONSUMER: 9 * MB})
    inner = Budget(name="inner", bounds={CONSUMER: 4 * MB}, share=Share(outer), when=WORKING)
    world = Scheduled(rule(0, share=Share(inner)))
    assert world.bound() == 4
    world.pass_to(EVENING_S)
    assert world.bound() == 9


def test_a_budget_is_left_by_the_one_around_it():
    outer = Budget(name="outer", bounds={CONSUMER: 3 * MB}, when=WORKING)
    inner = Budget(name="inner", bounds={CONSUMER: 4 * MB}, share=Share(outer))
    empty = Budget(name="empty", bounds={}, share=Share(outer))
    world = Scheduled(rule(0, share=Share(inner)), rule(1, name="b", share=Share(empty)))
    assert (world.bound(), world.bound("b")) == (3, 3)
    world.pass_to(EVENING_S)
    assert (world.bound(), world.bound("b")) == (4, None)


def test_a_budget_is_guaranteed_what_the_rules_in_force_are():
    outer = Budget(name="outer", bounds={CONSUMER: 9 * MB})
    inner = Budget(name="inner", bounds={}, share=Share(outer, guaranteed=5 * MB))
    settings = QuotaManagerSettings(
        rules=(
            rule(0, when=WORKING, share=Share(inner, guaranteed=5 * MB)),
            rule(1, share=Share(inner, guaranteed=2 * MB)),
            rule(2, name="b", when=NIGHT, share=Share(inner, guaranteed=1 * MB)),
        )
    )
    for at_s, guaranteed in ((DAY_S, 5), (EVENING_S, 2), (NIGHT_S, 3)):
        first, *_ = ScheduledSettings.at(settings, at_s).settings.rules
        assert first.share.budget.share.guaranteed == guaranteed * MB


def test_schedules_are_in_what_members_compare():
    for each in THREE:
        assert Rule.of(each.document()).when == each.when
    assert "when" not in THREE[0].document()
    budget = Budget(name="all", bounds={CONSUMER: MB}, when=NIGHT)
    assert Rule.of(rule(0, share=Share(budget)).document()).share.budget.when == NIGHT


def test_check_says_what_is_not_in_force_and_when_it_is():
    budget = Budget(name="all", bounds={CONSUMER: 9 * MB}, when=NIGHT)
    settings = QuotaManagerSettings(rules=(*THREE, rule(3, name="b", share=Share(budget))))
    night = "mon-sun 22:00 to 06:00 Europe/Berlin"
    assert list(explain_out_of_force(settings, DAY_S)) == [
        "rule 0 is not in force at 2026-11-26T12:00Z: rule 1 is for the same clients, and goes "
        "first (mon-fri 08:00 to 18:00 Europe/Berlin)",
        "rule 2 is not in force at 2026-11-26T12:00Z; it is from 2026-11-26 22:00+01:00 on "
        f"({night})",
        "rule 3 is not in force at 2026-11-26T12:00Z: no budget that it is in has a rate then, "
        "and it has none of its own",
        "budget all is not in force at 2026-11-26T12:00Z; it is from 2026-11-26 22:00+01:00 on "
        f"({night})",
    ]
    assert list(explain_out_of_force(QuotaManagerSettings(rules=THREE[:1]), DAY_S)) == []
