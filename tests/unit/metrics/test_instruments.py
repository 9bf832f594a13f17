"""Names, labels, help texts and buckets as users and dashboards rely on them."""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from metrics import BoundedLabels, HistogramChild, Instruments

PREFIX = "kafka_quota_proxy_"
LABELS = {
    "bytes_total": ("listener", "user", "client_id", "api"),
    "requests_total": ("api", "version"),
    "broker_seconds": ("api",),
    "proxy_seconds": ("api",),
    "hold_seconds": ("api",),
    "throttle_seconds": ("quota",),
    "delay_queue_size": ("api",),
    "kept_bytes": (),
    "kept_bytes_waiting": (),
    "delay_queue_lag_seconds": (),
    "connections": ("listener",),
    "connections_limit": (),
    "silent_connections": (),
    "unbounded_clients": (),
    "overflow_clients": ("quota",),
    "brokers_without_port": ("listener",),
    "ready": (),
    "cluster_reachable": (),
    "login_refused": (),
    "state_writable": (),
    "certificate_not_after_timestamp_seconds": ("role", "listener"),
    "event_loop_lag_seconds": (),
    "throttling_paused": (),
    "rules_not_enforced": (),
    "connections_rejected_total": ("reason",),
    "upstream_errors_total": ("reason",),
    "config_reloads_total": ("result",),
    "config_last_reload_successful": (),
    "topic_walks_total": (),
    "build_info": ("version",),
    "steered_connections_total": (),
    "visits_bytes_total": (),
    "rules_digest": ("tier", "digest"),
    "ledger_completion_seconds": ("pipeline",),
    "ledger_failed_total": ("pipeline", "reason"),
}
NAME = re.compile(r"[a-z][a-z0-9_]*")
MOMENT = "_timestamp_seconds"
"""Ends the name of a gauge, not of a histogram."""
new_counter = partial(Counter, "c", "C.", registry=None)


@pytest.fixture
def exposed():
    return CollectorRegistry()


@pytest.fixture
def instruments(exposed):
    return Instruments(exposed, max_label_sets=3)


def touch_all(instruments):
    """Make one series of every metric, with label values that name their label."""
    for name, labels in LABELS.items():
        metric = getattr(instruments, name)
        if isinstance(metric, BoundedLabels):
            metric = metric.of(*labels)
        elif labels:
            metric = metric.labels(*labels)
        if isinstance(metric, Histogram | HistogramChild):
            metric.observe(0.5)
        else:
            metric.inc()


def families_of(exposed):
    return list(text_string_to_metric_families(generate_latest(exposed).decode()))


def samples_of(exposed):
    """Return every exposed sample as {(name without prefix, sorted labels): value}."""
    return {
        (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
        for family in families_of(exposed)
        for sample in family.samples
    }


def test_exactly_these_series_are_exposed(instruments, exposed):
    touch_all(instruments)

    expected = set()
    for name, labels in LABELS.items():
        is_histogram = name.endswith("_seconds") and not name.endswith(MOMENT)
        suffixes = ("_bucket", "_count", "_sum") if is_histogram else ("",)
        expected |= {(PREFIX + name + suffix, frozenset(labels)) for suffix in suffixes}
    found = {
        (sample.name, frozenset(set(sample.labels) - {"le"}))
        for family in families_of(exposed)
        for sample in family.samples
    }
    assert found == expected


def test_labels_are_given_in_the_documented_order(instruments, exposed):
    touch_all(instruments)

    for (name, labels), _ in samples_of(exposed).items():
        assert all(key == value for key, value in labels if key != "le"), name


def test_the_text_has_what_linters_ask_for(instruments, exposed):
    """The rules of `promtool check metrics`: help, lower case, suffixes that fit the type."""
    touch_all(instruments)
    families = families_of(exposed)

    assert len(families) == len(LABELS)
    for family in families:
        assert NAME.fullmatch(family.name)
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        names = {sample.name for sample in family.samples}
        if family.type == "counter":
            assert names == {family.name + "_total"}
        elif family.type == "gauge":
            assert not any(n.endswith(("_total", "_count", "_sum", "_bucket")) for n in names)
        else:
            assert family.name.endswith("_seconds")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("throttle_seconds", Histogram),
        ("delay_queue_lag_seconds", Histogram),
        ("delay_queue_size", Gauge),
        ("connections", Gauge),
        ("connections_rejected_total", Counter),
    ],
)
def test_plain_metrics_are_of_their_kind(instruments, name, kind):
    assert isinstance(getattr(instruments, name), kind)


@pytest.mark.parametrize(
    ("name", "shortest_s", "longest_s"),
    [
        pytest.param("throttle_seconds", 0.001, 30.0, id="throttle 1 ms to 30 s"),
        pytest.param("delay_queue_lag_seconds", 0.0001, 1.0, id="lag 0.1 ms to 1 s"),
    ],
)
def test_buckets(instruments, exposed, name, shortest_s, longest_s):
    touch_all(instruments)

    bounds = [
        float(dict(labels)["le"])
        for sample, labels in samples_of(exposed)
        if sample == name + "_bucket"
    ]
    assert bounds == sorted(bounds)
    assert (bounds[0], bounds[-2], bounds[-1]) == (shortest_s, longest_s, float("inf"))


def test_two_sets_of_instruments_do_not_meet():
    first, second = CollectorRegistry(), CollectorRegistry()
    Instruments(first, max_label_sets=1).connections.labels("a").inc()
    Instruments(second, max_label_sets=1)

    assert (("connections", (("listener", "a"),))) in samples_of(first)
    assert (("connections", (("listener", "a"),))) not in samples_of(second)


def test_a_child_is_made_once(instruments):
    child = instruments.bytes_total.of("default", "alice", "etl", "Fetch")

    assert instruments.bytes_total.of("default", "alice", "etl", "Fetch") is child
    assert instruments.bytes_total.of("default", "alice", "etl", "Produce") is not child


def test_what_exceeds_the_bound_is_counted_under_other(instruments, exposed):
    for number in range(10):
        instruments.bytes_total.of("default", "alice", f"spark-{number}", "Fetch").inc(5)

    def bytes_of(user, client_id):
        labels = {"listener": "default", "user": user, "client_id": client_id, "api": "Fetch"}
        return exposed.get_sample_value(PREFIX + "bytes_total", labels)

    assert [bytes_of("alice", f"spark-{number}") for number in range(4)] == [5, 5, 5, None]
    assert bytes_of("other", "other") == 35


def test_labels_that_clients_do_not_choose_stay_under_other(instruments, exposed):
    for number in range(3):
        instruments.ledger_failed_total.of(f"pipeline-{number}", "timeout").inc()
    for reason in ("timeout", "failed"):
        instruments.ledger_failed_total.of("late", reason).inc()

    for reason in ("timeout", "failed"):
        labels = {"pipeline": "other", "reason": reason}
        assert exposed.get_sample_value(PREFIX + "ledger_failed_total", labels) == 1


def test_unknown_api_versions_cannot_flood_the_scrape(instruments, exposed):
    for version in range(1000):
        instruments.requests_total.of("Fetch", str(version)).inc()

    series = [labels for name, labels in samples_of(exposed) if name == "requests_total"]
    assert len(series) == 4


def test_a_held_child_goes_on_counting_when_the_bound_is_reached(instruments, exposed):
    held = instruments.requests_total.of("Fetch", "12")
    for version in range(10):
        instruments.requests_total.of("Produce", str(version)).inc()
    held.inc()

    labels = {"api": "Fetch", "version": "12"}
    assert exposed.get_sample_value(PREFIX + "requests_total", labels) == 1


def test_forgotten_sets_make_room(instruments, exposed):
    for api in ("Fetch", "Produce"):
        instruments.bytes_total.of("default", "alice", "gone", api).inc()
    instruments.bytes_total.of("default", "alice", "stays", "Fetch").inc()

    gone = "default", "alice", "gone"
    assert instruments.bytes_total.forget(*gone) == 2
    assert instruments.bytes_total.forget(*gone) == 0
    instruments.bytes_total.of("default", "bob", "new", "Fetch").inc()

    clients = [
        dict(labels)["client_id"] for name, labels in samples_of(exposed) if name == "bytes_total"
    ]
    assert sorted(clients) == ["new", "stays"]


class Unwalked(dict):
    """Sets that can be found, and not walked over."""

    def __iter__(self):
        raise AssertionError("a walk over all sets")

    keys = values = items = __iter__


@pytest.mark.slow
def test_50_000_clients_come_and_go_without_a_walk_and_the_counts_are_exact(exposed):
    labels = ("listener", "client_id", "api")
    bounded = BoundedLabels(new_counter, "C.", labels, ("client_id",), 1000)
    exposed.register(bounded)
    bounded.children = Unwalked()
    for number in range(50_000):
        for api in ("Fetch", "Produce"):
            bounded.of("default", f"spark-{number}", api).inc(number)
        if number >= 400:
            assert bounded.forget("default", f"spark-{number - 400}") == 2
    bounded.children = dict(dict.items(bounded.children))

    found = {
        (sample.labels["client_id"], sample.labels["api"]): sample.value
        for family in exposed.collect()
        for sample in family.samples
    }
    assert found == {
        (f"spark-{number}", api): number
        for number in range(49_600, 50_000)
        for api in ("Fetch", "Produce")
    }
    assert len(bounded.last_values) == 400


def test_the_text_is_that_of_a_plain_metric(exposed):
    labels = ("client_id", "api")
    plain, new = CollectorRegistry(), partial(Histogram, "h_seconds", "H.", registry=None)
    bounded = BoundedLabels(new, "H.", labels, ("client_id",), 2)
    exposed.register(bounded)
    histogram = Histogram("h_seconds", "H.", labels, registry=plain)
    for client_id in ('a"b', "c\nd", "late", "later"):
        bounded.of(client_id, "Fetch").observe(0.2)
        shown = client_id if "late" not in client_id else "other"
        histogram.labels(shown, "Fetch").observe(0.2)

    assert generate_latest(exposed) == generate_latest(plain)


def test_a_set_that_goes_while_samples_are_read_is_left_out(instruments):
    for number in range(3):
        instruments.bytes_total.of("default", "", str(number), "Fetch").inc()
    (family,) = instruments.bytes_total.collect()
    samples = iter(family.samples)
    first = next(samples)
    instruments.bytes_total.forget("default", "", "1")
    instruments.bytes_total.of("default", "", "new", "Fetch").inc()

    assert [sample.labels["client_id"] for sample in (first, *samples)] == ["0", "2"]


def test_a_client_called_other_that_comes_when_there_is_room_again_is_shown_once(
    instruments, exposed
):
    for client_id in ("a", "b", "c", "late"):
        instruments.bytes_total.of("default", "other", client_id, "Fetch").inc()
    instruments.bytes_total.forget("default", "other", "a")
    instruments.bytes_total.of("default", "other", "other", "Fetch").inc()

    text = generate_latest(exposed).decode()
    assert text.count('client_id="other"') == 1
    assert (
        samples_of(exposed)[
            (
                "bytes_total",
                tuple(
                    sorted(
                        {
                            "api": "Fetch",
                            "client_id": "other",
                            "listener": "default",
                            "user": "other",
                        }.items()
                    )
                ),
            )
        ]
        == 2
    )


def test_a_client_called_other_is_only_counted_with_the_others():
    bounded = BoundedLabels(new_counter, "C.", ("client",), ("client",), 1)

    assert bounded.of("other") is bounded.of("late")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda bounded: bounded.of("a"), id="too few"),
        pytest.param(lambda bounded: bounded.of("a", "b", "c"), id="too many"),
        pytest.param(lambda bounded: bounded.forget(), id="no label to forget"),
        pytest.param(lambda bounded: bounded.forget("a", "b"), id="the last label as well"),
    ],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_wrong_labels_are_refused(instruments, call, is_full):
    if is_full:
        for number in range(3):
            instruments.requests_total.of("Fetch", str(number))
    with pytest.raises(ValueError, match="label values for"):
        call(instruments.requests_total)


@pytest.mark.parametrize(
    ("open_labels", "max_sets", "message"),
    [
        pytest.param(("client",), 0, "max_sets must be 1 or more", id="no room"),
        pytest.param(("colour",), 1, "not all among", id="unknown label"),
    ],
)
def test_bad_bounds_are_refused(open_labels, max_sets, message):
    with pytest.raises(ValueError, match=message):
        BoundedLabels(new_counter, "C.", ("client",), open_labels, max_sets)


def test_a_scrape_may_run_beside_the_counting(instruments, exposed):
    child = instruments.bytes_total.of("default", "alice", "etl", "Fetch")
    with ThreadPoolExecutor(1) as pool:
        scrape = pool.submit(lambda: [generate_latest(exposed) for _ in range(20)])
        for _ in range(1000):
            child.inc()
        scrape.result()

    labels = {"listener": "default", "user": "alice", "client_id": "etl", "api": "Fetch"}
    assert exposed.get_sample_value(PREFIX + "bytes_total", labels) == 1000
