"""What records of many members say of a client: once each, and to within 5 %."""

import math
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parts.usage_world import record

from proxy.quota.entities import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from proxy.usage.observed_usage import ROOM_BYTES, ObservedClient, ObservedUsage, normalized_client
from proxy.usage.usage_record import quantile_of, rate_bucket_of

SPARK = "consumer-spark-kafka-source-{}-1234567-executor-{}"
RUNS = ("92017897-daab-4d28-a2d5-5cc4133bee8f", "C11A5E77-01D1-4431-A753-36BFC3FA3355")


def seen_of(observed, name="etl", kind=CONSUMER_BYTE_RATE, user=None, *, is_prefix=False):
    for _ in observed.finishing():
        pass
    return observed.by_client.get(ObservedClient(user, name, is_prefix), {}).get(kind)


@given(st.lists(st.floats(0.01, 1e13), min_size=1), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_at_most_five_percent_high(rates, share):
    exact = sorted(rates)[math.ceil(share * len(rates) - 1e-9) - 1]
    found = quantile_of(Counter(map(rate_bucket_of, rates)), share, max(rates))
    assert exact * (1 - 1e-9) <= found <= exact * 1.05 * (1 + 1e-9)


def test_nothing_was_seen():
    assert quantile_of({}, 0.99, 0.0) == 0.0


@pytest.mark.parametrize(
    ("user", "client_id", "client"),
    [
        (None, "etl", ObservedClient(None, "etl", False)),
        ("anna", "reports-7", ObservedClient("anna", "reports-7", False)),
        *(
            (None, SPARK.format(run, n), ObservedClient(None, "consumer-spark-kafka-source-", True))
            for run in RUNS
            for n in (1, 2)
        ),
        (None, RUNS[0], ObservedClient(None, "", True)),
        (None, "", ObservedClient(None, "", False)),
        (None, RUNS[0][:-1], ObservedClient(None, RUNS[0][:-1], False)),
    ],
)
def test_whom_a_client_counts_as(user, client_id, client):
    assert normalized_client(user, client_id, is_hashed=False) == client


def test_doubles_count_once_by_member_run_and_partition():
    observed = ObservedUsage(10)
    for partition, changes in (
        (0, {"sequence": 0}),
        (0, {"sequence": 3}),
        (0, {"sequence": 0}),
        (0, {"sequence": 3}),
        (0, {"sequence": 4}),
        (1, {"sequence": 1, "direction": "write"}),
        (0, {"sequence": 0, "epoch": 2}),
        (0, {"sequence": 0, "member": "other/0"}),
    ):
        observed.add_message(partition, record(**changes).model_dump_json().encode())
    assert (seen_of(observed).total_bytes, seen_of(observed).counts) == (5000, {7: 10})
    assert seen_of(observed, kind=PRODUCER_BYTE_RATE).total_bytes == 1000


@pytest.mark.parametrize("value", [None, b"", b"{}", b"\xff", b'{"schema_version":1}'])
def test_what_is_no_record_is_counted(value):
    observed = ObservedUsage(10)
    observed.add_message(0, value)
    newer = record().model_dump_json().replace('"schema_version":1', '"schema_version":2')
    observed.add_message(0, newer.encode())
    assert (observed.unread, observed.by_client) == (2, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"rates": {100_000: 1}},
        {"rates": {-100_000: 1}},
        {"rates": {216: 3 * 10**7}},
        {"rates": {216: -5}},
        {"bytes": 10**400},
        {"peak": math.inf},
    ],
)
def test_figures_that_cannot_be_are_no_record(changes):
    observed = ObservedUsage(10)
    value = record().model_copy(update=changes).model_dump_json().encode()
    observed.add_message(0, value.replace(b'"peak":null', b'"peak":1e999'))
    assert (observed.unread, observed.by_client) == (1, {})


def memory_after(observed, messages) -> int:
    tracemalloc.start()
    try:
        for each in messages:
            observed.add_message(0, record(**each).model_dump_json().encode())
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_long_names_do_not_fill_the_memory():
    observed, many = ObservedUsage(100), range(600)
    names = ({"sequence": n, "user": f"{n}" * 5_000, "client_id": f"{n}" * 5_000} for n in many)
    assert memory_after(observed, names) < 4 * ROOM_BYTES * 100
    assert len(observed.left_out) > 50


def test_rates_do_not_fill_the_memory():
    observed = ObservedUsage(20)
    records = (
        {
            "sequence": n,
            "client_id": f"c{n % 20}",
            "rates": dict.fromkeys(range(-500, 900), 1),
        }
        for n in range(40)
    )
    assert memory_after(observed, records) < 4 * ROOM_BYTES * 20
    assert observed.left_out


@pytest.mark.parametrize("count", [900_000, 190_000])
def test_one_record_of_very_many_rates_of_clients_made_anew_is_not_kept_by_interval(count):
    observed = ObservedUsage(10)
    executors = ({"client_id": RUNS[0], "rates": {7: count}}, {"client_id": RUNS[1], "rates": {}})
    assert memory_after(observed, executors) < 100_000
    assert seen_of(observed, "", is_prefix=True).counts == {7: count}


def test_intervals_without_a_rate_do_not_fill_the_memory():
    ends = ({"sequence": n, "client_id": RUNS[0], "end_ms": n, "rates": {}} for n in range(5000))
    assert memory_after(ObservedUsage(10), ends) < 100_000


def test_members_that_are_made_up_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("proxy.usage.observed_usage.MAX_WRITERS", 100)
    members = ({"member": f"{n}" * 5_000} for n in range(1000))
    assert memory_after(ObservedUsage(10), members) < 100_000


def test_bytes_without_a_rate_make_no_series():
    observed = ObservedUsage(10)
    observed.add(record(rates={}, peak=0.0))
    assert seen_of(observed) is None


def test_executors_are_bounded_together_so_their_rates_of_an_interval_are_added():
    observed = ObservedUsage(10)
    for number, run in enumerate(RUNS):
        for minute in (1, 2):
            client_id = SPARK.format(run, number)
            rates = {rate_bucket_of(100.0 * minute): 6}
            observed.add(record(client_id=client_id, end_ms=minute, rates=rates, peak=1.0))
    seen = seen_of(observed, "consumer-spark-kafka-source-", is_prefix=True)
    assert sum(seen.counts.values()) == 12
    assert seen.quantile(0.5) == pytest.approx(200, rel=0.11)
    assert seen.peak == pytest.approx(400, rel=0.06)


def test_users_are_told_apart_and_hashed_names_are_no_names():
    observed = ObservedUsage(10)
    observed.add(record(user="anna"))
    observed.add(record(hashed=True, client_id=RUNS[0]))
    assert seen_of(observed, user="anna") is not None
    assert seen_of(observed) is None
    assert [each.is_hashed for each in observed.by_client] == [False, True]


def test_there_are_no_more_clients_than_fit():
    observed = ObservedUsage(2)
    for number in range(10):
        for direction in ("read", "write"):
            observed.add(record(client_id=f"c{number}", direction=direction))
    assert sum(map(len, observed.by_client.values())) == 4
    assert len(observed.left_out) == 2
