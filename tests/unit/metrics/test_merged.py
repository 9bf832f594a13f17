"""Several members' metrics as one: sums, and counters that never go back."""

import math
import shutil
import subprocess
from collections import Counter as Tally

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts.at_once import in_one_go
from parts.query_world import configured
from parts.reports import ReportingDriver, batch_document, parsed
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metrics import (
    Instruments,
    MemberInstruments,
    MemberScrape,
    MergedMetrics,
    MetricConfig,
    MetricName,
    Quota,
    Rate,
    Registry,
    Sensor,
    SensorCollector,
)
from metrics.kept_counters import LEAST_KEPT_SETS
from proxy.progress.progress_collector import ProgressCollector
from proxy.progress.query_registry import QueryRegistry

PREFIX = "kafka_quota_proxy_"
HOSTILE = 'a"} 5\\\n# HELP x y\u2028\x85\x0b, b="other'


class MemberProcess:
    """One member with real instruments and sensors, which can die and come again."""

    def __init__(self, max_label_sets: int = 100) -> None:
        self.run = 0
        self._max_label_sets = max_label_sets
        self.restart()

    def restart(self) -> None:
        self.run += 1
        self.exposed = CollectorRegistry()
        self.instruments = Instruments(self.exposed, max_label_sets=self._max_label_sets)
        self.sensors = Registry(100)
        self.exposed.register(SensorCollector(self.sensors, lambda: 0.0))

    def count(self, client_id: str, amount: float = 1) -> None:
        self.instruments.bytes_total.of("default", "", client_id, "Fetch").inc(amount)

    def forget(self, client_id: str) -> None:
        self.instruments.bytes_total.forget(listener="default", user="", client_id=client_id)

    def measure(self, entity: str, amount: float, bound: float) -> None:
        def sensor() -> Sensor:
            made = Sensor(entity)
            labels = (("quota_entity", entity), ("quota", "consumer_byte_rate"))
            config = MetricConfig(quota=Quota(bound))
            made.add(MetricName("rate_bytes", "Rate.", labels), Rate(), config)
            return made

        self.sensors.get_or_create(entity, sensor, 0.0).record(amount, 0.0)

    def text(self) -> bytes:
        return generate_latest(self.exposed)

    def scrape(self) -> MemberScrape:
        return MemberScrape.read(self.text(), self.run)


def samples_of(text):
    """Return what the official parser reads, and check that no series and no family is doubled."""
    families = list(text_string_to_metric_families(text.decode()))
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert [name for name, times in Tally(key for key, _ in found).items() if times > 1] == []
    assert [n for n, times in Tally(family.name for family in families).items() if times > 1] == []
    return dict(found)


def bytes_of(text, client_id):
    labels = {"listener": "default", "user": "", "client_id": client_id, "api": "Fetch"}
    return samples_of(text).get((PREFIX + "bytes_total", frozenset(labels.items())))


def value_of(text, name, **labels):
    return samples_of(text).get((PREFIX + name, frozenset(labels.items())))


@pytest.fixture
def merged():
    return MergedMetrics(max_label_sets=100)


def busy(number: int = 1) -> MemberProcess:
    """A member that shows something of each kind."""
    member = MemberProcess()
    for client_id in ("etl", HOSTILE, "ünïcode", "", f"own-{number}"):
        member.count(client_id, 10.0**number)
        member.measure(f"client-id={client_id}", 1.5 * number, 1e9)
    member.instruments.connections.labels("default").set(number)
    member.instruments.ready.set(1)
    member.instruments.adaptive_bound_bytes.of("nan").set(math.nan)
    member.instruments.adaptive_bound_bytes.of("inf").set(math.inf)
    member.instruments.adaptive_bound_bytes.of("less").set(-math.inf)
    member.instruments.throttle_seconds.labels("consumer_byte_rate").observe(0.3)
    member.instruments.broker_seconds.labels("Fetch").observe(number)
    member.instruments.ledger_completion_seconds.of(HOSTILE).observe(number)
    return member


def test_one_member_is_shown_as_it_shows_itself(merged):
    member = busy()
    assert merged.merge({"0": member.scrape()}) == member.text()
    member.count("etl", 1e17)
    member.forget("own-1")
    assert merged.merge({"0": member.scrape()}) == member.text()


def test_counters_and_histograms_are_added_and_gauges_by_their_meaning(merged):
    first, second = busy(1), busy(2)
    second.instruments.ready.set(0)
    second.instruments.broker_seconds.labels("Produce").observe(1)
    text = merged.merge({"0": first.scrape(), "1": second.scrape()})
    for client_id in ("etl", HOSTILE, "ünïcode", ""):
        assert bytes_of(text, client_id) == 110
    assert (bytes_of(text, "own-1"), bytes_of(text, "own-2")) == (10, 100)
    assert value_of(text, "connections", listener="default") == 3
    assert value_of(text, "ready") == 0
    assert math.isnan(value_of(text, "adaptive_bound_bytes", query="nan"))
    assert value_of(text, "adaptive_bound_bytes", query="inf") == math.inf
    assert value_of(text, "adaptive_bound_bytes", query="less") == -math.inf
    assert value_of(text, "broker_seconds_sum", api="Fetch") == 3
    assert value_of(text, "broker_seconds_count", api="Fetch") == 2
    assert value_of(text, "broker_seconds_bucket", api="Fetch", le="1.0") == 1
    assert value_of(text, "broker_seconds_bucket", api="Fetch", le="+Inf") == 2
    assert value_of(text, "broker_seconds_count", api="Produce") == 1


def test_the_rate_is_the_owners_and_clients_without_room_are_added(merged):
    owner, other = MemberProcess(), MemberProcess()
    owner.measure("client-id=etl", 100, 1e6)
    other.measure("client-id=etl", 30, 1e6)
    for entity in ("other", "other,client-id=<default>"):
        owner.measure(entity, 100, 1e6)
        other.measure(entity, 30, 2e6)
    text = merged.merge({"0": owner.scrape(), "1": other.scrape()})

    def shown(name, entity):
        return value_of(text, name, quota_entity=entity, quota="consumer_byte_rate")

    assert (shown("rate_bytes", "client-id=etl"), shown("bound_bytes", "client-id=etl")) == (
        10,
        1e6,
    )
    for entity in ("other", "other,client-id=<default>"):
        assert (shown("rate_bytes", entity), shown("bound_bytes", entity)) == (13, 3e6)


def test_what_is_counted_as_other_is_added(merged):
    members = [MemberProcess(max_label_sets=1), MemberProcess(max_label_sets=1)]
    for number, member in enumerate(members):
        for client in range(3):
            member.instruments.requests_total.of(f"{number}-{client}", "1").inc()
    text = merged.merge({str(n): member.scrape() for n, member in enumerate(members)})
    assert value_of(text, "requests_total", api="other", version="other") == 4


def follow(member: MemberProcess, lags: list[int]) -> None:
    """Follow the query `orders`, whose partitions have completed 5 of their records."""
    queries = QueryRegistry(configured("orders"), lambda _: True, lambda _: None)
    batch = batch_document(0, None, dict.fromkeys(range(len(lags)), 5), "t")
    report = ReportingDriver().document("progress", batch=batch)
    in_one_go(queries.reports.accepting(parsed(report), 0.0, 0.0))
    for partition, lag in enumerate(lags):
        queries.log_end("t", partition, 5 + lag, 0.0)
    member.exposed.register(ProgressCollector(queries, lambda: 1000.0, 1))


def test_a_query_is_its_owners_and_partitions_without_room_are_added(merged):
    members = {"owner": MemberProcess(), "had it before": MemberProcess()}
    follow(members["owner"], [10, 20, 30])
    follow(members["had it before"], [7, 1, 1])
    text = merged.merge({name: member.scrape() for name, member in members.items()})
    orders = {"query": "orders", "topic": "t", "partition": "0"}
    others = dict.fromkeys(orders, "other")
    assert value_of(text, "partition_lag", **orders) == 10
    assert value_of(text, "partition_high_watermark", **orders) == 15
    assert value_of(text, "partition_lag", **others) == 20 + 30 + 1 + 1
    assert value_of(text, "partition_lag_seconds", **others) == 1
    assert value_of(text, "spark_reports_total", result="accepted") == 2


def test_a_restart_takes_nothing_from_the_counters(merged):
    stays, dies = busy(1), busy(2)
    assert bytes_of(merged.merge({"0": stays.scrape(), "1": dies.scrape()}), "etl") == 110
    dies.restart()
    text = merged.merge({"0": stays.scrape(), "1": dies.scrape()})
    assert (bytes_of(text, "etl"), bytes_of(text, "own-2")) == (110, 100)
    assert value_of(text, "broker_seconds_count", api="Fetch") == 2
    assert value_of(text, "connections", listener="default") == 1
    dies.count("own-2", 5)
    text = merged.merge({"0": stays.scrape(), "1": dies.scrape()})
    assert bytes_of(text, "own-2") == 105


def test_who_does_not_answer_counts_with_its_last_values_and_shows_no_gauges(merged):
    first, second = busy(1), busy(2)
    second.instruments.ready.set(0)
    merged.merge({"0": first.scrape(), "1": second.scrape()})
    text = merged.merge({"0": first.scrape(), "1": None})
    assert bytes_of(text, "etl") == 110
    assert value_of(text, "connections", listener="default") == 1
    assert value_of(text, "ready") == 1
    text = merged.merge({"0": None, "1": None})
    assert bytes_of(text, "etl") == 110
    assert value_of(text, "ready") is None
    text = merged.merge({"0": first.scrape(), "1": second.scrape()})
    assert bytes_of(text, "etl") == 110


def test_a_member_that_has_gone_leaves_what_it_counted(merged):
    first, second = busy(1), busy(2)
    merged.merge({"0": first.scrape(), "1": second.scrape()})
    text = merged.merge({"0": first.scrape()})
    assert (bytes_of(text, "etl"), bytes_of(text, "own-2")) == (110, 100)


def test_a_client_that_all_have_forgotten_is_gone(merged):
    first, second = busy(1), busy(2)
    members = {"0": first, "1": second}

    def shown():
        return bytes_of(merged.merge({n: each.scrape() for n, each in members.items()}), "etl")

    assert shown() == 110
    second.forget("etl")
    assert shown() == 110
    first.count("etl", 5)
    assert shown() == 115
    first.forget("etl")
    assert shown() is None
    second.count("etl", 1)
    assert shown() == 1


def test_a_client_that_came_again_between_two_scrapes_goes_on_where_others_show_it(merged):
    first, second = busy(1), busy(2)
    merged.merge({"0": first.scrape(), "1": second.scrape()})
    second.forget("etl")
    second.count("etl", 1)
    assert bytes_of(merged.merge({"0": first.scrape(), "1": second.scrape()}), "etl") == 111


def test_a_client_that_came_again_at_the_only_member_begins_anew_as_there(merged):
    member = busy()
    merged.merge({"0": member.scrape()})
    member.forget("etl")
    member.count("etl", 1)
    assert merged.merge({"0": member.scrape()}) == member.text()


def test_a_histogram_that_began_anew_goes_on_as_a_whole(merged):
    first, second = MemberProcess(), MemberProcess()
    members = {"0": first, "1": second}
    for member in members.values():
        for amount in (0.05, 0.05, 50):
            member.instruments.ledger_completion_seconds.of("orders").observe(amount)
    merged.merge({n: each.scrape() for n, each in members.items()})
    second.instruments.ledger_completion_seconds.forget(pipeline="orders")
    for amount in (0.05, *(50,) * 7):  # fewer in the first bucket, more in the last one
        second.instruments.ledger_completion_seconds.of("orders").observe(amount)
    text = merged.merge({n: each.scrape() for n, each in members.items()})
    name = "ledger_completion_seconds"
    assert value_of(text, name + "_bucket", pipeline="orders", le="0.1") == 5
    assert value_of(text, name + "_bucket", pipeline="orders", le="+Inf") == 14
    assert value_of(text, name + "_count", pipeline="orders") == 14
    assert value_of(text, name + "_sum", pipeline="orders") == pytest.approx(0.25 + 9 * 50)


def test_a_sum_that_falls_by_itself_is_no_new_histogram(merged):
    members = {"0": MemberProcess(), "1": MemberProcess()}
    for amount in (2.0, -1.0):
        for member in members.values():
            member.instruments.delay_queue_lag_seconds.observe(amount)
        text = merged.merge({n: each.scrape() for n, each in members.items()})
    assert value_of(text, "delay_queue_lag_seconds_sum") == 2
    assert value_of(text, "delay_queue_lag_seconds_count") == 4


def test_clients_of_dead_runs_are_kept_up_to_a_bound_the_oldest_go_first():
    most = LEAST_KEPT_SETS + 50
    merged = MergedMetrics(max_label_sets=most)
    member = MemberProcess(max_label_sets=most)
    member.count("stays")
    for run in range(5):
        for number in range(400):
            member.count(f"{run}-{number}")
        member.count("stays")
        member.instruments.broker_seconds.labels("Fetch").observe(1)
        text = merged.merge({"0": member.scrape()})
        member.restart()
    text = merged.merge({"0": member.scrape()})
    shown = [
        dict(labels)["client_id"]
        for name, labels in samples_of(text)
        if name == PREFIX + "bytes_total"
    ]
    assert len(shown) == most
    assert bytes_of(text, "4-399") == bytes_of(text, "3-0") == 1
    assert bytes_of(text, "0-399") is None
    assert bytes_of(text, "stays") == 6, "each run showed it, so it is not old"
    assert value_of(text, "broker_seconds_count", api="Fetch") == 5


def test_what_dead_runs_counted_of_a_client_that_is_shown_is_no_matter_of_room():
    merged = MergedMetrics(max_label_sets=1)
    stays, dies = MemberProcess(), MemberProcess(max_label_sets=LEAST_KEPT_SETS)
    for member in (stays, dies):
        member.count("etl", 10)
    for run in range(3):
        merged.merge({"0": stays.scrape(), "1": dies.scrape()})
        dies.restart()
        for number in range(LEAST_KEPT_SETS):
            dies.count(f"{run}-{number}")
    assert bytes_of(merged.merge({"0": stays.scrape(), "1": dies.scrape()}), "etl") == 20


def test_members_that_have_gone_are_kept_up_to_the_same_bound():
    merged = MergedMetrics(max_label_sets=1)
    for number in range(2 * LEAST_KEPT_SETS):
        text = f'# HELP a A.\n# TYPE a counter\na{{id="{number}"}} 1.0\n'
        merged.merge({str(number): MemberScrape.read(text.encode(), 1)})
    assert len(merged) == LEAST_KEPT_SETS + 1


LARGE = 2.0**53
"""And 1 are not a float, but with 2 it is one."""


def test_no_rounding_lets_a_counter_go_back(merged):
    first, second, third = members = [MemberProcess() for _ in range(3)]

    def shown():
        return bytes_of(merged.merge({str(n): m.scrape() for n, m in enumerate(members)}), "etl")

    first.count("etl", 1)
    second.count("etl", 1)
    third.count("etl", LARGE)
    assert shown() == LARGE + 2
    first.restart()
    assert shown() == LARGE + 2, "in another order"
    third.restart()
    assert shown() >= LARGE + 2, "1 added to a large base"


def test_infinite_counters_do_not_stop_the_others(merged):
    members = {"0": busy(1), "1": busy(2)}
    members["0"].count("etl", math.inf)
    for _ in range(2):
        assert (
            bytes_of(merged.merge({n: m.scrape() for n, m in members.items()}), "etl") == math.inf
        )
        members["0"].restart()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"a 1.0\n", id="no HELP"),
        pytest.param(b"# HELP a A.\n# TYPE a gauge\na 1.0", id="cut off"),
        pytest.param(b"# HELP a A.\n# TYPE b gauge\nb 1.0\n", id="TYPE of another"),
        pytest.param(b"# HELP a A.\na 1.0\n", id="no TYPE"),
        pytest.param(b"# HELP a A.\n# TYPE a gauge\na 1.0 1700000000000\n", id="a timestamp"),
        pytest.param(b"# HELP a A.\n# TYPE a gauge\na one\n", id="no number"),
        pytest.param(b"# HELP a A.\n# TYPE a gauge\na 1.0\na 2.0\n", id="a series twice"),
        pytest.param(b"# HELP a A.\n# TYPE a gauge\na 1.0\n\n", id="an empty line"),
        pytest.param(2 * b"# HELP a A.\n# TYPE a gauge\na 1.0\n", id="a family twice"),
        pytest.param(b"<html>\n", id="another document"),
    ],
)
def test_what_is_no_text_of_ours_is_refused(text):
    with pytest.raises(ValueError, match="metrics: "):
        MemberScrape.read(text, 1)


def test_no_text_is_no_families(merged):
    assert merged.merge({"0": MemberScrape.read(b"", 1)}) == b""
    assert merged.merge({}) == b""


def test_times_of_creation_are_the_earliest(merged):
    head = b"# HELP a_created A.\n# TYPE a_created gauge\n"
    scrapes = {n: MemberScrape.read(head + b"a_created %b.0\n" % n.encode(), 1) for n in "21"}
    assert merged.merge(scrapes) == head + b"a_created 1.0\n"


def test_room_for_no_label_sets_is_refused():
    with pytest.raises(ValueError, match="max_label_sets"):
        MergedMetrics(max_label_sets=0)


def test_promtool_finds_nothing_to_say(merged):
    path = shutil.which("promtool")
    if path is None:
        pytest.fail("promtool is missing: apt-get install prometheus")
    supervisor = CollectorRegistry()
    own = MemberInstruments(supervisor)
    own.workers.set(2)
    own.worker_restarts_total.labels("1").inc()
    own.slots_owned.labels("0").set(128)
    own.tier_generation.labels("night").set(3)
    members = {"0": busy(1), "1": busy(2)}
    members["1"].instruments.rules_digest.labels("night", "abc").set(1)
    scrapes = {name: member.scrape() for name, member in members.items()}
    scrapes["supervisor"] = MemberScrape.read(generate_latest(supervisor), 1)
    text = merged.merge(scrapes)
    assert value_of(text, "workers") == 2
    done = subprocess.run([path, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# Whatever happens: three members count, forget, die, are silent, go, in any order.
MEMBERS, CLIENTS = "abc", ("etl", HOSTILE, "other")
steps = st.one_of(
    st.tuples(
        st.just("count"),
        st.sampled_from(MEMBERS),
        st.sampled_from(CLIENTS),
        st.one_of(st.integers(0, 2**60), st.floats(0, 1e15)),
    ),
    st.tuples(st.just("forget"), st.sampled_from(MEMBERS), st.sampled_from(CLIENTS), st.just(0)),
    st.tuples(st.just("restart"), st.sampled_from(MEMBERS), st.just(""), st.just(0)),
    st.tuples(st.just("silent"), st.sampled_from(MEMBERS), st.just(""), st.just(0)),
    st.tuples(st.just("merge"), st.just(""), st.just(""), st.just(0)),
)


class Machine:
    """Members and what is merged of them, one step after the other."""

    def __init__(self) -> None:
        self.merged = MergedMetrics(max_label_sets=2)
        self.members = {name: MemberProcess() for name in MEMBERS}
        self.silent: set[str] = set()

    def take(self, what, name, client, amount):
        if what == "count":
            self.members[name].count(client, amount)
            self.members[name].instruments.ledger_completion_seconds.of(client).observe(amount)
        elif what == "forget":
            self.members[name].forget(client)
            self.members[name].instruments.ledger_completion_seconds.forget(pipeline=client)
        elif what == "restart":
            self.members[name].restart()
        elif what == "silent":
            self.silent.add(name)

    def text(self):
        silent, self.silent = self.silent, set()
        return self.merged.merge(
            {n: None if n in silent else each.scrape() for n, each in self.members.items()}
        )


def is_counted(name):
    return name.endswith(("_total", "_bucket", "_count", "_sum"))


@settings(max_examples=60, deadline=None)
@given(st.lists(steps.filter(lambda step: step[0] != "forget"), max_size=30))
def test_no_counter_ever_goes_back(taken):
    machine = Machine()
    before = {}
    for step in taken:
        machine.take(*step)
        if step[0] == "merge":
            now = samples_of(machine.text())
            counted = {key: value for key, value in now.items() if is_counted(key[0])}
            assert {key for key in before if key not in counted} == set()
            assert {key for key, value in before.items() if counted[key] < value} == set()
            before = counted


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=30))
def test_buckets_always_fit_each_other(taken):
    machine = Machine()
    for step in taken:
        machine.take(*step)
        if step[0] == "merge":
            for family in text_string_to_metric_families(machine.text().decode()):
                buckets: dict[frozenset[tuple[str, str]], list[float]] = {}
                for sample in family.samples:
                    labels = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
                    if sample.name.endswith("_bucket"):
                        buckets.setdefault(labels, []).append(sample.value)
                    elif sample.name.endswith("_count"):
                        assert buckets[labels][-1] == sample.value
                assert all(counts == sorted(counts) for counts in buckets.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=30))
def test_without_restarts_the_sum_is_that_of_the_members(taken):
    machine = Machine()
    for step in taken:
        if step[0] in ("count", "merge"):
            machine.take(*step)
    machine.text()
    shown = samples_of(machine.text())
    parts = [samples_of(member.text()) for member in machine.members.values()]
    for key, value in shown.items():
        if is_counted(key[0]):
            assert value == math.fsum(part[key] for part in parts if key in part)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps.filter(lambda step: step[0] != "restart"), max_size=20))
def test_one_member_alone_is_always_shown_as_it_is(taken):
    merged, member = MergedMetrics(max_label_sets=2), MemberProcess()
    machine = Machine()
    machine.members = dict.fromkeys(MEMBERS, member)
    for step in taken:
        machine.take(*step)
        if step[0] == "merge":
            assert merged.merge({"0": member.scrape()}) == member.text()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=8))
def test_what_is_kept_is_bounded(counts):
    merged = MergedMetrics(max_label_sets=1)
    head = b"# HELP a_total A.\n# TYPE a_total counter\n"
    for run, count in enumerate(counts):
        lines = b"".join(b'a_total{id="%d-%d"} 1.0\n' % (run, n) for n in range(count))
        shown = merged.merge({"0": MemberScrape.read(head + lines, run)})
        assert len(merged) <= count + LEAST_KEPT_SETS
        assert shown.count(b"\na_total{") == len(merged)


@pytest.mark.parametrize("is_steered", [True, False], ids=["each at one member", "all everywhere"])
def test_four_members_with_10000_clients_each(is_steered):
    counters = ("bytes_total", "violations_total", "throttled_responses_total")
    gauges = ("rate_bytes", "bound_bytes")
    clients = [f"consumer-orders-92017897-{n}" for n in range(10_000)]

    def text(number, value):
        lines = []
        for name in (*counters, *gauges):
            kind = "counter" if name in counters else "gauge"
            lines.append(f"# HELP {PREFIX}{name} Meaning.\n# TYPE {PREFIX}{name} {kind}\n")
            owner = number if is_steered else 0
            lines += (
                f'{PREFIX}{name}{{quota="consumer_byte_rate",quota_entity="{owner} {c}"}} {value}\n'
                for c in clients
            )
        return "".join(lines).encode()

    merged = MergedMetrics(max_label_sets=10_000)
    for scrape in range(2):
        texts = {str(n): text(n, 1e6 * n + scrape) for n in range(4)}
        shown = merged.merge({n: MemberScrape.read(each, 1) for n, each in texts.items()})
    assert shown.count(b"\n") == 10 + 5 * 10_000 * (4 if is_steered else 1)
