"""What the manager charges to whom, under rules that come and go."""

import pytest
from parts.quota_world import QuotaWorld, figures_of, sensor_collector, shown_figure
from parts.sensor_views import sensors_in_use
from prometheus_client import generate_latest

from proxy.admin.sensor_rows import SHOWN_CLIENTS, rows_by_client
from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.meters import QUIET_MS, longest_throttle
from proxy.quota.rules import QuotaManagerSettings, Rule

CONSUMER = QuotaKind.CONSUMER_BYTE_RATE
PRODUCER = QuotaKind.PRODUCER_BYTE_RATE
REQUEST = QuotaKind.REQUEST_PERCENTAGE
HOUR_MS = 3_600_000.0
MB = 1_000_000


class ManagerWorld(QuotaWorld):
    """A manager whose overflows and states are written down."""

    def __init__(self, *rules: Rule, **settings):
        self.overflows: list[tuple[int, QuotaKind]] = []
        self.states: list[tuple[str, QuotaKind, Rule, bool, float, float]] = []
        self.settings = settings
        self.open_quotas(
            QuotaManagerSettings(rules=rules, **settings),
            on_overflow=lambda rule, kind: self.overflows.append((rule.number, kind)),
            on_state=self.tell,
        )

    def tell(self, meter, throttled, now_ms):
        rate, bound = meter.rate.measure(now_ms), meter.shown_bound
        self.states.append((meter.entity, meter.kind, meter.rule, throttled, rate, bound))

    def update(self, *rules: Rule):
        self.quotas.update(QuotaManagerSettings(rules=rules, **self.settings))

    def hold(self, client, value, now_ms, kind=CONSUMER):
        """ThrottleDecision, and hold the response as the relay does."""
        charge = client.charge(kind, value, now_ms)
        if charge is not None:
            self.quotas.held(charge, charge.due_ms - now_ms, now_ms)
        return charge

    def entities(self, now_ms=0.0):
        return sorted(row.entity for row in self.rows(now_ms))

    def row(self, entity, now_ms):
        (row,) = [row for row in self.rows(now_ms) if row.entity == entity]
        return row

    def gauge(self, name, **labels):
        return self.prometheus.get_sample_value(f"kafka_quota_proxy_{name}", labels)

    def counted(self, name, entity, kind=CONSUMER):
        return shown_figure(self.quotas, f"{name}_total", entity, kind)


def rule(number=0, /, consumer=1 * MB, producer=None, request=None, scope="each", **keys):
    bounds = {CONSUMER: consumer, PRODUCER: producer, REQUEST: request}
    bounds = {kind: float(bound) for kind, bound in bounds.items() if bound is not None}
    return Rule(**keys, bounds=bounds, scope=scope, number=number)


ALL = rule(9, client_id=DEFAULT)


def test_a_client_without_a_rule_is_neither_measured_nor_held():
    world = ManagerWorld(rule(client_id="other"))
    client = world.client_quotas()
    assert not client.has(CONSUMER)
    assert client.charge(CONSUMER, 1e12, 0.0) is None
    assert world.entities() == []


def test_a_response_within_the_bound_is_measured_and_not_held():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    assert client.has(CONSUMER)
    assert not client.has(PRODUCER)
    assert client.charge(CONSUMER, 5 * MB, 0.0) is None
    row = world.row("client-id=c", 0.0)
    assert (row.rate, row.bound, row.window_ms, row.owed_ms) == (0.5 * MB, MB, 10_000.0, 0.0)
    assert row.rule == ALL
    assert world.counted("violations", "client-id=c") is None


def test_the_formula_gives_the_first_delay():
    """11 MB/s measured over 5 s against 10 MB/s: 500 ms."""
    world = ManagerWorld(rule(client_id=DEFAULT, consumer=10 * MB), samples=6)
    charge = world.client_quotas().charge(CONSUMER, 55 * MB, 100.0)
    assert figures_of(charge) == (600.0, 500, CONSUMER, "client-id=c")
    assert world.counted("violations", "client-id=c") == 1
    assert world.row("client-id=c", 200.0).owed_ms == 400.0


def test_busy_time_is_measured_in_percent_of_one_connections_time():
    world = ManagerWorld(rule(client_id=DEFAULT, consumer=None, request=50))
    client = world.client_quotas()
    for second in range(10):
        assert client.charge(REQUEST, 500.0, second * 1000.0) is None
    assert world.row("client-id=c", 10_000.0).rate == pytest.approx(50.0)
    assert client.charge(REQUEST, 300.0, 10_000.0).delay_ms == pytest.approx(600, abs=1)
    charge = client.charge(REQUEST, 5000.0, 10_000.0)
    assert (charge.delay_ms, charge.meter.kind) == (1000, REQUEST), (
        "one window at most, as with Kafka"
    )


def test_of_three_quotas_the_largest_delay_counts_and_not_the_sum():
    world = ManagerWorld(rule(client_id=DEFAULT, consumer=MB, producer=2 * MB, request=100))
    client = world.client_quotas()
    charges = [
        client.charge(CONSUMER, 11 * MB, 0.0),
        client.charge(PRODUCER, 26 * MB, 0.0),
        client.charge(REQUEST, 10_500.0, 0.0),
    ]
    assert [charge.delay_ms for charge in charges] == [1000, 3000, 500]
    assert longest_throttle(charges) is charges[1]
    assert longest_throttle([None, charges[2], None]) is charges[2]
    assert longest_throttle([None]) is None
    assert longest_throttle([]) is None


def test_one_hold_is_at_most_max_delay():
    world = ManagerWorld(ALL, max_delay_ms=2000.0)
    charge = world.client_quotas().charge(CONSUMER, 50 * MB, 7.0)
    assert figures_of(charge) == (2007.0, 2000, CONSUMER, "client-id=c")
    assert world.row("client-id=c", 7.0).owed_ms == 40_000.0


@pytest.mark.parametrize(
    ("session_timeout_ms", "longest_ms"),
    [(10_000, 3333), (45_000, 15_000), (120_000, 20_000), (6000, 2000), (1, 2000), (-1, 2000)],
)
def test_a_hold_is_at_most_a_third_of_a_group_members_session(session_timeout_ms, longest_ms):
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.joined(session_timeout_ms)
    assert client.charge(CONSUMER, 50 * MB, 0.0).delay_ms == longest_ms
    client.joined(300_000)
    assert client.charge(CONSUMER, 1.0, 0.0).delay_ms == longest_ms, "the shortest one counts"


@pytest.mark.parametrize(
    ("scope", "entities"),
    [
        ("each", ["client-id=a", "client-id=b"]),
        ("shared", ["client-id=<default>"]),
    ],
)
def test_scope(scope, entities):
    world = ManagerWorld(rule(client_id=DEFAULT, scope=scope))
    a, b = world.client_quotas("a"), world.client_quotas("b")
    assert a.charge(CONSUMER, 10 * MB, 0.0) is None
    held = b.charge(CONSUMER, 10 * MB, 0.0)
    assert (held is not None) is (scope == "shared")
    assert world.entities() == entities


def test_connections_of_one_client_share_its_handle_until_the_last_one_closes():
    world = ManagerWorld(ALL)
    one, two = world.client_quotas(), world.client_quotas()
    assert one is two
    one.close()
    assert world.client_quotas() is two
    two.close()
    one.close()
    assert world.client_quotas() is not one
    assert len(world.quotas.clients()) == 1


def test_a_client_that_connects_again_finds_its_history():
    world = ManagerWorld(ALL)
    first = world.client_quotas()
    assert first.charge(CONSUMER, 10 * MB, 0.0) is None
    first.close()
    assert world.client_quotas().charge(CONSUMER, 1 * MB, 10.0) is not None


# Overflow


def test_further_clients_share_one_sensor_and_are_metered():
    world = ManagerWorld(ALL, max_client_entities=2)
    clients = [world.client_quotas(f"c{number}") for number in range(5)]
    charges = [client.charge(CONSUMER, 5 * MB, 0.0) for client in clients]
    assert world.entities() == ["client-id=c0", "client-id=c1", "other"]
    assert charges[:4] == [None] * 4
    assert figures_of(charges[4]) == (5000.0, 5000, CONSUMER, "other")
    assert world.overflows == [(9, CONSUMER)]
    assert world.counted("violations", "other") == 1


def test_who_shares_a_sensor_is_counted_while_connected():
    world = ManagerWorld(ALL, max_client_entities=1)
    clients = [world.client_quotas(f"c{number}") for number in range(4)]
    for client in clients:
        client.charge(CONSUMER, 1.0, 0.0)
    assert world.gauge("overflow_clients", quota="consumer_byte_rate") == 3
    assert world.gauge("overflow_clients", quota="producer_byte_rate") == 0
    clients[1].close()
    assert world.gauge("overflow_clients", quota="consumer_byte_rate") == 2
    world.quotas.update(QuotaManagerSettings(rules=(ALL,), max_client_entities=3))
    for client in clients[2:]:
        client.charge(CONSUMER, 1.0, 1.0)
    assert world.gauge("overflow_clients", quota="consumer_byte_rate") == 0


def test_who_has_no_quota_any_more_shares_none():
    world = ManagerWorld(ALL, max_client_entities=1)
    for number in range(2):
        world.client_quotas(f"c{number}").charge(CONSUMER, 1.0, 0.0)
    assert world.gauge("overflow_clients", quota="consumer_byte_rate") == 1
    world.quotas.update(QuotaManagerSettings())
    assert list(world.quotas.settling()) == [True, True]
    assert world.gauge("overflow_clients", quota="consumer_byte_rate") == 0


def test_being_held_is_expected_where_the_rule_says_so():
    world = ManagerWorld(rule(client_id="backfill", expected=True), rule(1, client_id="orders"))
    for client_id in ("backfill", "orders"):
        world.client_quotas(client_id).charge(CONSUMER, 1.0, 0.0)

    def expected(client_id: str) -> float | None:
        return shown_figure(world.quotas, "expected_throttling", f"client-id={client_id}")

    assert (expected("backfill"), expected("orders")) == (1, None)
    world.quotas.update(QuotaManagerSettings(rules=(rule(client_id="backfill"),)))
    world.client_quotas("backfill").charge(CONSUMER, 1.0, 1.0)
    assert expected("backfill") is None


def test_rules_overflow_apart_since_their_bounds_differ_and_rules_for_one_client_never_do():
    exact = rule(1, client_id="exact")
    tenants = rule(2, listener="tenants", consumer=2 * MB)
    world = ManagerWorld(exact, tenants, ALL, max_client_entities=1)
    for client_id, listener in (("a", "l"), ("b", "l"), ("c", "tenants"), ("exact", "l")):
        world.client_quotas(client_id, listener=listener).charge(CONSUMER, 1.0, 0.0)
    assert world.entities() == [
        "client-id=a",
        "client-id=exact",
        "other",
        "other,listener=tenants",
    ]
    assert world.row("other,listener=tenants", 0.0).bound == 2 * MB
    assert sorted(world.overflows) == [(2, CONSUMER), (9, CONSUMER)]


def test_each_kind_has_room_for_as_many_clients():
    world = ManagerWorld(rule(client_id=DEFAULT, producer=MB), max_client_entities=1)
    world.client_quotas("a").charge(CONSUMER, 1.0, 0.0)
    world.client_quotas("b").charge(PRODUCER, 1.0, 0.0)
    assert world.entities() == ["client-id=a", "client-id=b"]


def test_a_client_that_went_away_makes_room_after_an_hour():
    world = ManagerWorld(ALL, max_client_entities=1)
    world.client_quotas("a").charge(CONSUMER, 1.0, 0.0)
    world.client_quotas("b").charge(CONSUMER, 1.0, HOUR_MS)
    assert world.entities() == ["client-id=b"]
    assert world.overflows == []


def test_who_has_a_rule_by_name_is_measured_without_room():
    world = ManagerWorld(ALL, rule(1, client_id="exact"), max_client_entities=1)
    for client_id in ("a", "b", "exact", "c"):
        world.client_quotas(client_id).charge(CONSUMER, 1.0, 0.0)
    assert world.entities() == ["client-id=a", "client-id=exact", "other"]
    assert len(world.sensors) == 3


def test_sensors_are_few_when_every_rule_overflows():
    rules = [rule(number, client_id_prefix=f"p{number}-", producer=1) for number in range(3)]
    world = ManagerWorld(*rules, max_client_entities=2)
    for number in range(9):
        client = world.client_quotas(f"p{number % 3}-{number}")
        for kind in (CONSUMER, PRODUCER):
            client.charge(kind, 1.0, 0.0)
    assert len(world.sensors) == 2 * (2 + 3)


# Expiry


def test_a_handle_whose_sensor_expired_gets_a_new_one():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.charge(CONSUMER, 11 * MB, 0.0)
    assert sum(world.quotas.expiring(HOUR_MS - 1)) == 0
    assert sum(world.quotas.expiring(HOUR_MS)) == 1
    assert world.entities() == []
    assert world.counted("violations", "client-id=c") is None
    assert client.charge(CONSUMER, 11 * MB, HOUR_MS) is not None
    assert world.row("client-id=c", HOUR_MS).rate == pytest.approx(1.1 * MB)
    assert world.counted("violations", "client-id=c") == 1


def test_two_handles_agree_on_the_new_sensor():
    world = ManagerWorld(rule(client_id=DEFAULT, scope="shared"))
    a, b = world.client_quotas("a"), world.client_quotas("b")
    a.charge(CONSUMER, 1.0, 0.0)
    b.charge(CONSUMER, 1.0, 0.0)
    sum(world.quotas.expiring(HOUR_MS))
    assert a.charge(CONSUMER, 10 * MB, HOUR_MS) is None
    assert b.charge(CONSUMER, 1 * MB, HOUR_MS) is not None
    assert len(world.sensors) == 1


def test_a_new_client_lets_no_more_idle_ones_go_than_it_takes():
    world = ManagerWorld(ALL, max_client_entities=3)
    for number in range(3):
        world.client_quotas(f"old-{number}").charge(CONSUMER, 1.0, float(number))
    world.client_quotas("new").charge(CONSUMER, 1.0, HOUR_MS + 5.0)

    assert world.entities() == [f"client-id={each}" for each in ("new", "old-1", "old-2")]
    assert world.overflows == []
    world.client_quotas("newer").charge(CONSUMER, 1.0, HOUR_MS + 5.0)
    entities = [f"client-id={each}" for each in ("new", "newer", "old-2")]
    assert world.entities() == entities
    for each in ("newest", "last"):
        world.client_quotas(each).charge(CONSUMER, 1.0, HOUR_MS + 5.0)
    entities = [f"client-id={each}" for each in ("new", "newer", "newest")]
    assert world.entities() == [*entities, "other"]
    assert world.overflows == [(9, CONSUMER)]


@pytest.mark.slow
def test_20_000_clients_come_and_go_and_each_has_a_sensor_of_its_own():
    """One each 40 s, idle an hour later: 90 sensors are in use, and there is room for 95."""
    world = ManagerWorld(ALL, max_client_entities=95)
    for number in range(20_000):
        now_ms = number * 40_000.0
        client = world.client_quotas(f"spark-{number}")
        charge = client.charge(CONSUMER, 11 * MB, now_ms)
        assert charge.meter.entity == f"client-id=spark-{number}"
        client.close()
        if number % 20 == 0:
            sum(world.quotas.expiring(now_ms))

    assert world.overflows == []
    assert world.quotas.clients() == []
    assert 90 <= len(world.sensors) <= 95
    assert sum(world.quotas.expiring(now_ms + HOUR_MS)) >= 90
    assert world.entities() == []


def test_sensors_may_come_and_go_between_the_steps_of_expiring():
    world = ManagerWorld(ALL)
    clients = [world.client_quotas(name) for name in "abc"]
    for client in clients:
        client.charge(CONSUMER, 1.0, 0.0)
    world.update(ALL)
    steps = world.quotas.expiring(HOUR_MS)
    assert next(steps) is True
    clients[0].charge(CONSUMER, 1.0, HOUR_MS)
    clients[1].charge(CONSUMER, 1.0, HOUR_MS)
    assert sum(steps) == 1
    assert world.entities() == ["client-id=a", "client-id=b"]


def test_an_update_between_the_steps_of_expiring_is_not_overlooked():
    world = ManagerWorld(ALL)
    for name in "ab":
        world.client_quotas(name).charge(CONSUMER, 1.0, 0.0)
    world.update(ALL)
    steps = world.quotas.expiring(1000.0)
    next(steps)
    world.update()
    list(steps)
    assert sum(world.quotas.expiring(20_000.0)) == 2


def test_rows_and_readings_are_those_of_each_step():
    world = ManagerWorld(ALL)
    clients = {name: world.client_quotas(name) for name in "abc"}
    for client in clients.values():
        client.charge(CONSUMER, 10 * MB, 0.0)
    world.now_ms = 0.0
    rows = sensors_in_use(world.quotas, lambda: world.now_ms)
    readings = world.quotas.measured_rates(lambda: 0.0)
    meter, rate = next(readings)
    assert (next(rows).rate, rate) == (MB, MB)
    assert (meter.entity, meter.kind, meter.shown_bound) == ("client-id=a", CONSUMER, MB)

    world.now_ms = 20_000.0
    world.update()
    clients["b"].close()
    assert sum(world.quotas.expiring(20_000.0)) == 3
    assert list(rows) == list(readings) == []


def test_rows_leave_out_clients_that_have_gone():
    world = ManagerWorld(rule(client_id=DEFAULT, scope="shared"))
    a, b = world.client_quotas("a"), world.client_quotas("b")
    for client in (a, b):
        client.charge(CONSUMER, 1.0, 0.0)
    steps = rows_by_client(world.quotas, lambda: 0.0)
    assert next(steps) == []
    b.close()
    (row,) = (row for rows in steps for row in rows)
    assert [client.client_id for client in row.clients] == ["a"]


# Rules changed at run time


def test_an_entity_that_remains_keeps_its_history_under_the_new_bound():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.charge(CONSUMER, 9 * MB, 0.0)
    world.update(rule(4, client_id="c", consumer=2 * MB))
    assert client.charge(CONSUMER, 9 * MB, 10.0) is None
    row = world.row("client-id=c", 10.0)
    assert (row.bound, row.rule.number) == (2 * MB, 4)
    assert row.rate == pytest.approx(1.8 * MB, rel=0.01)
    assert client.charge(CONSUMER, 9 * MB, 20.0) is not None


def test_a_lower_bound_holds_the_next_response():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.charge(CONSUMER, 9 * MB, 0.0)
    world.update(rule(client_id=DEFAULT, consumer=100_000))
    assert client.charge(CONSUMER, 100_000, 10.0).delay_ms == 1000


def test_a_rule_that_appears_or_goes_is_noticed_by_open_connections():
    world = ManagerWorld()
    client = world.client_quotas()
    assert not client.has(CONSUMER)
    world.update(ALL)
    assert client.has(CONSUMER)
    assert client.charge(CONSUMER, 11 * MB, 0.0) is not None
    world.update()
    assert not client.has(CONSUMER)
    assert client.charge(CONSUMER, 11 * MB, 0.0) is None


def test_a_sensor_that_no_rule_names_goes_when_its_window_is_empty():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.charge(CONSUMER, 1 * MB, 0.0)
    world.update(rule(client_id=DEFAULT, scope="shared"))
    client.charge(CONSUMER, 1 * MB, 1.0)
    assert sum(world.quotas.expiring(1000.0)) == 0
    assert world.entities(1000.0) == ["client-id=<default>", "client-id=c"]
    assert sum(world.quotas.expiring(11_000.0)) == 1
    assert world.entities() == ["client-id=<default>"]


def test_what_a_client_owes_outlives_its_window_and_an_update():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.charge(CONSUMER, 50 * MB, 0.0)
    world.update(ALL)
    assert sum(world.quotas.expiring(15_000.0)) == 0
    assert client.charge(CONSUMER, 1 * MB, 15_000.0).delay_ms == 20_000


def test_max_delay_and_windows_follow_an_update():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    client.charge(CONSUMER, 50 * MB, 0.0)
    world.quotas.update(
        QuotaManagerSettings(rules=(ALL,), max_delay_ms=500.0, samples=21, window_ms=100.0)
    )
    assert client.charge(CONSUMER, 1.0, 10.0).delay_ms == 500
    assert world.row("client-id=c", 10.0).window_ms == pytest.approx(2010.0)


# Holds and throttling


def test_the_holds_of_the_last_minute_are_counted_and_added_up():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    assert world.hold(client, 5 * MB, 0.0) is None
    row = world.row("client-id=c", 0.0)
    assert (row.holds, row.held_ms, row.hold_until_ms, row.throttled) == (0, 0.0, None, False)
    world.hold(client, 6 * MB, 0.0)
    world.hold(client, 2 * MB, 500.0)
    row = world.row("client-id=c", 600.0)
    assert (row.holds, row.held_ms, row.hold_until_ms) == (2, 1000.0 + 12_000.0, 12_500.0)
    row = world.row("client-id=c", 12_500.0)
    assert (row.holds, row.hold_until_ms) == (2, None)
    assert world.row("client-id=c", 59_000.0).holds == 2
    row = world.row("client-id=c", 66_000.0)
    assert (row.holds, row.held_ms) == (0, 0.0)


def test_a_charge_that_was_not_waited_for_is_no_hold():
    world = ManagerWorld(ALL)
    assert world.client_quotas().charge(CONSUMER, 50 * MB, 0.0) is not None
    assert world.row("client-id=c", 0.0).holds == 0
    assert world.states == []


def test_a_hold_of_a_sensor_that_is_gone_counts_for_nobody():
    world = ManagerWorld(ALL)
    charge = world.client_quotas().charge(CONSUMER, 50 * MB, 0.0)
    sum(world.quotas.expiring(HOUR_MS))
    world.quotas.held(charge, 20_000.0, HOUR_MS)
    assert world.states == []


def test_throttling_is_told_once_when_it_begins_and_once_when_it_has_ended():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    began = ("client-id=c", CONSUMER, ALL, True, 1.1 * MB, MB)
    for now_ms in (0.0, 1000.0, 20_000.0):  # due after 1, 21 and 32.5 s
        assert world.hold(client, 11 * MB, now_ms) is not None
        assert sum(world.quotas.sweeping(now_ms)) == 0
        assert world.states == [began]
    due_ms = world.row("client-id=c", 20_000.0).hold_until_ms
    assert due_ms == 32_500.0
    assert sum(world.quotas.sweeping(due_ms + QUIET_MS - 1)) == 0
    assert world.row("client-id=c", due_ms + QUIET_MS - 1).throttled
    assert sum(world.quotas.sweeping(due_ms + QUIET_MS)) == 1
    assert world.states == [began, ("client-id=c", CONSUMER, ALL, False, 0.0, MB)]
    assert not world.row("client-id=c", due_ms + QUIET_MS).throttled
    assert sum(world.quotas.sweeping(due_ms + 10 * QUIET_MS)) == 0
    assert world.hold(client, 50 * MB, HOUR_MS) is not None
    assert [state[3] for state in world.states] == [True, False, True]


def test_each_kind_of_quota_begins_and_ends_by_itself():
    world = ManagerWorld(rule(client_id=DEFAULT, producer=MB))
    client = world.client_quotas()
    world.hold(client, 11 * MB, 0.0)
    world.hold(client, 11 * MB, 10_000.0, PRODUCER)
    sum(world.quotas.sweeping(1000.0 + QUIET_MS))
    sum(world.quotas.sweeping(11_000.0 + QUIET_MS))
    told = [(kind, throttled) for _, kind, _, throttled, _, _ in world.states]
    assert told == [(CONSUMER, True), (PRODUCER, True), (CONSUMER, False), (PRODUCER, False)]


def test_throttling_goes_on_over_an_update_and_ends_under_the_new_rule():
    world = ManagerWorld(ALL)
    client = world.client_quotas()
    world.hold(client, 11 * MB, 0.0)
    lower = rule(4, client_id="c", consumer=MB / 2)
    world.update(lower)
    world.hold(client, 1 * MB, 500.0)
    sum(world.quotas.sweeping(100_000.0))
    assert [(state[2], state[3], state[5]) for state in world.states] == [
        (ALL, True, MB),
        (lower, False, MB / 2),
    ]


def test_holds_may_begin_and_sensors_go_between_the_steps_of_sweeping():
    world = ManagerWorld(ALL)
    clients = [world.client_quotas(name) for name in "abc"]
    for client in clients:
        world.hold(client, 11 * MB, 0.0)
    steps = world.quotas.sweeping(1000.0 + QUIET_MS)
    assert next(steps) is True
    world.hold(clients[1], 50 * MB, 1000.0 + QUIET_MS)
    assert list(steps) == [False, True]
    steps = world.quotas.sweeping(2 * HOUR_MS)
    assert sum(world.quotas.expiring(2 * HOUR_MS)) == 3
    assert list(steps) == []
    assert [state[3] for state in world.states].count(False) == 3


@pytest.mark.parametrize("how", ["idle", "without a rule"])
def test_throttling_ends_when_its_sensor_goes(how):
    world = ManagerWorld(ALL)
    world.hold(world.client_quotas(), 11 * MB, 0.0)
    if how == "without a rule":
        world.update()
    assert sum(world.quotas.expiring(HOUR_MS)) == 1
    assert [state[3] for state in world.states] == [True, False]
    assert sum(world.quotas.sweeping(HOUR_MS)) == 0


def test_a_row_names_the_connected_clients_that_share_its_sensor():
    world = ManagerWorld(rule(1, client_id_prefix="p", scope="shared"), ALL)
    clients = [world.client_quotas(client_id) for client_id in ("p1", "p2", "c", "silent")]
    for client in clients[:3]:
        client.charge(CONSUMER, 1.0, 0.0)
    row = world.row("client-id-prefix=p", 0.0)
    assert [client.client_id for client in row.clients] == ["p1", "p2"]
    assert row.client_count == 2
    assert [client.client_id for client in world.row("client-id=c", 0.0).clients] == ["c"]
    clients[0].close()
    row = world.row("client-id-prefix=p", 0.0)
    assert [client.client_id for client in row.clients] == ["p2"]
    clients[1].close()
    row = world.row("client-id-prefix=p", 0.0)
    assert (row.clients, row.client_count) == ((), 0)


def test_a_row_names_a_bounded_number_of_clients_and_counts_all():
    world = ManagerWorld(rule(client_id=DEFAULT, scope="shared"))
    for number in range(SHOWN_CLIENTS + 5):
        world.client_quotas(f"c{number}").charge(CONSUMER, 1.0, 0.0)
    row = world.row("client-id=<default>", 0.0)
    assert (len(row.clients), row.client_count) == (SHOWN_CLIENTS, SHOWN_CLIENTS + 5)


def test_all_connected_clients_are_listed_also_those_without_a_rule():
    world = ManagerWorld(rule(client_id="c"))
    world.client_quotas("c")
    other = world.client_quotas("other")
    assert [identity.client_id for identity in world.quotas.clients()] == ["c", "other"]
    other.close()
    assert [identity.client_id for identity in world.quotas.clients()] == ["c"]


def test_clients_that_no_rule_bounds_are_listed_and_counted():
    gauge = "kafka_quota_proxy_unbounded_clients"
    named = rule(client_id="etl")
    world = ManagerWorld(named)
    assert world.prometheus.get_sample_value(gauge) == 0
    open_ids = ["ETL", "et\N{ZERO WIDTH SPACE}l", None]
    clients = [world.client_quotas(client_id) for client_id in ("etl", *open_ids)]
    assert [client.client_id for client in world.quotas.unbounded()] == open_ids
    assert [client.is_bounded for client in clients] == [True, False, False, False]
    assert world.prometheus.get_sample_value(gauge) == 3

    clients[1].close()
    assert world.prometheus.get_sample_value(gauge) == 2
    world.update(named, rule(1, consumer=None, request=50.0, client_id=DEFAULT))
    sum(world.quotas.settling())
    assert world.quotas.unbounded() == []
    world.update()
    assert not clients[0].has(CONSUMER)
    assert [client.client_id for client in world.quotas.unbounded()] == ["etl"]
    sum(world.quotas.settling())
    assert world.prometheus.get_sample_value(gauge) == 3

    for client in (clients[0], *clients[2:]):
        client.close()
        assert client.charge(CONSUMER, 1.0, 0.0) is None
    world.update(rule(2, client_id="nobody"))
    clients[0].has(CONSUMER)
    assert world.quotas.unbounded() == []


def test_a_handle_that_was_given_back_says_nothing_of_its_successor():
    world = ManagerWorld()
    before = world.client_quotas("c")
    before.close()
    world.client_quotas("c")
    world.update(rule(client_id="other"))
    before.has(CONSUMER)
    assert [client.client_id for client in world.quotas.unbounded()] == ["c"]


def test_rules_of_silent_clients_are_looked_up_one_by_one():
    world = ManagerWorld(ALL)
    clients = [world.client_quotas(f"c{number}") for number in range(5)]
    world.update()
    steps = world.quotas.settling()
    assert (next(steps), len(world.quotas.unbounded())) == (True, 1)
    clients[0].has(CONSUMER)
    world.update(ALL)
    assert sum(steps) == 5
    assert world.quotas.unbounded() == []
    assert sum(world.quotas.settling()) == 0


def test_explain_follows_the_rules_in_force():
    exact = rule(1, client_id="c")
    world = ManagerWorld(ALL)
    identity = ClientIdentity("l", None, "c")
    assert [row.rule for row in world.quotas.table.explain(identity) if row.chosen] == [ALL]
    world.update(exact, ALL)
    considered = world.quotas.table.explain(identity)
    assert [(row.rule, row.chosen) for row in considered] == [(exact, True), (ALL, False)]


def test_more_rules_at_run_time_leave_the_clients_their_places():
    world = ManagerWorld(ALL, max_client_entities=2)
    rules = [rule(number, client_id=f"exact{number}") for number in range(10)]
    world.update(*rules, ALL)
    for client_id in [f"exact{number}" for number in range(10)] + ["a", "b"]:
        for kind in QuotaKind:
            world.client_quotas(client_id).charge(kind, 1.0, 0.0)
    assert "other" not in world.entities()


# What is shown


def test_rate_and_bound_are_exposed_with_their_labels():
    world = ManagerWorld(ALL)
    world.client_quotas().charge(CONSUMER, 5 * MB, 0.0)
    world.prometheus.register(sensor_collector(world.quotas, lambda: 0.0))
    text = generate_latest(world.prometheus).decode()
    labels = 'quota="consumer_byte_rate",quota_entity="client-id=c"'
    swapped = 'quota_entity="client-id=c",quota="consumer_byte_rate"'
    lines = {line.replace(swapped, labels) for line in text.splitlines()}
    assert f"kafka_quota_proxy_rate_bytes{{{labels}}} 500000.0" in lines
    assert f"kafka_quota_proxy_bound_bytes{{{labels}}} 1e+06" in lines
