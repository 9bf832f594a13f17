"""What several members say, put together: nothing is lost, counted twice or out of order."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.admin.client_documents import IS_VISIT
from proxy.admin.history import merged_chart
from proxy.admin.pagination import Key, PageRequest, cursor_of
from proxy.admin.peers.fan_out_middleware import client_of_report
from proxy.admin.peers.merged_documents import TABLES, MemberDocuments
from proxy.admin.request_times import HISTOGRAMS, merged_times, quantile
from proxy.quota.entities import QuotaKind

KINDS = [str(kind) for kind in QuotaKind]
BOUND = 100.0
BOUNDS = [0.001, 0.01, 0.1]


def row(entity: str, rate: float, *, quota: str = KINDS[0], held: bool = False) -> dict[str, Any]:
    """Return a row as a member shows a sensor of one client, with its name as entity."""
    return {
        "entity": entity,
        "quota": quota,
        "rate": rate,
        "bound": BOUND,
        "throttled": held,
        "would_throttle": 0,
        "above_s": 0,
        "holds": int(held),
        "held_s": float(held),
        "hold_ends_in_s": 1.0 if held else None,
        "waiting": 0,
        "client_count": 1,
        "clients": [{"listener": "default", "user": None, "client_id": entity}],
        "group": entity,
    }


def told(rows: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return what a member with these rows, each of a client of its own, answers."""
    shown = sorted(rows, key=lambda each: (each["throttled"], each["rate"]), reverse=True)[:limit]
    held = sum(each["throttled"] for each in rows)
    counts = {"bounded": len(rows), "throttled": held, "held": held, "left": 0}
    return {
        "total": len(rows),
        "unbounded": 0,
        "client_counts": {**counts, "shown": len(shown)},
        "clients": shown,
    }


def merge_clients(documents: Iterable[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return what members 0, 1 and so on have told, put together."""
    by_member = {str(number): each for number, each in enumerate(documents)}
    return MemberDocuments(by_member, PageRequest(limit)).merged(TABLES["/v1/clients"])


@st.composite
def tiers(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Return the rows of some members; no client is at two of them."""
    names: Iterator[int] = iter(range(10_000))
    figures = st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=12)
    return [
        [row(f"c{next(names)}", float(rate), held=held) for rate, held in draw(figures)]
        for _ in range(draw(st.integers(1, 4)))
    ]


@given(tiers(), st.integers(0, 15))
def test_totals_are_sums_and_the_most_urgent_come_first(
    tier: list[list[dict[str, Any]]], limit: int
):
    merged = merge_clients((told(rows, limit) for rows in tier), limit)
    rows = [each for rows in tier for each in rows]
    assert merged["total"] == len(rows)
    counts = merged["client_counts"]
    assert (counts["bounded"], counts["throttled"]) == (
        len(rows),
        sum(r["throttled"] for r in rows),
    )
    urgencies = [(each["throttled"], each["rate"]) for each in merged["clients"]]
    wanted = sorted(((each["throttled"], each["rate"]) for each in rows), reverse=True)
    assert urgencies == wanted[:limit]  # as one member with all clients would have them
    assert counts["shown"] == len(merged["clients"])
    for each in merged["clients"]:
        assert each["entity"] in {own["entity"] for own in tier[int(each["member"])]}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.integers(1, 300)), max_size=12))
def test_a_client_of_several_members_is_one_row_of_its_owner(seen: list[tuple[int, int, int]]):
    tier: list[dict[str, dict[str, Any]]] = [{}, {}, {}]
    for member, client, rate in seen:
        about = {} if member == 1 else {IS_VISIT: True}
        tier[member][f"c{client}"] = row(f"c{client}", float(rate), held=rate > 200) | about
    merged = merge_clients((told(list(rows.values()), 99) for rows in tier), 99)
    clients = {f"c{client}" for _, client, _ in seen}
    assert sorted(each["entity"] for each in merged["clients"]) == sorted(clients)
    for each in merged["clients"]:
        alike = [rows[each["entity"]] for rows in tier if each["entity"] in rows]
        assert (each["holds"], IS_VISIT in each) == (sum(one["holds"] for one in alike), False)
        own = tier[1].get(each["entity"])
        if own is not None:
            assert (each["member"], each["rate"]) == ("1", own["rate"])


def test_the_quotas_of_a_client_stay_together_whatever_members_call_it():
    request = row("other", 9.0, quota=KINDS[2])
    one = told([{**row("a", 5.0), "group": "client=a"}, {**request, "group": "client=a"}], 9)
    other = told([row("a", 90.0) | {IS_VISIT: True}], 9)
    merged = merge_clients([one, other], 9)
    assert [each["entity"] for each in merged["clients"]] == ["a", "other"]
    assert len({each["group"] for each in merged["clients"]}) == 1


figures = st.lists(st.integers(1, 1000), max_size=20, unique=True)


@given(figures, st.integers(1, 3), st.integers(1, 8))
def test_paging_goes_through_all_connections(numbers: list[int], members: int, limit: int):
    seen: list[int] = []
    after: Key = ()
    while True:
        pages = {}
        for member in range(members):
            own = sorted(n for n in numbers if n % members == member)
            rows = [{"id": n} for n in own if (n, "a") > after]
            counts = {"total": len(own), "held": 0, "matching": len(rows)}
            more = "more" if len(rows) > limit else None
            pages[f"a/{member}"] = {**counts, "connections": rows[:limit], "next": more}
        page = MemberDocuments(pages, PageRequest(limit, after)).merged(TABLES["/v1/connections"])
        assert page["total"] == len(numbers)
        found = [int(each["id"].removeprefix("a/")) for each in page["connections"]]
        seen += found
        if page["next"] is None:
            break
        after = (found[-1], "a")
        assert page["next"] == cursor_of(after)
    assert seen == sorted(numbers)


rates = st.integers(0, 100).map(float)


@given(st.lists(st.tuples(rates, st.integers(0, 2)), max_size=12), st.integers(0, 12))
def test_the_rows_of_members_are_those_of_one_process(seen: list[tuple[float, int]], limit: int):
    rows = [{"id": n, "received_rate": rate, "sent_rate": None} for n, (rate, _) in enumerate(seen)]

    def document(own: list[dict[str, Any]]) -> dict[str, Any]:
        shown = sorted(own, key=lambda row: row["received_rate"], reverse=True)[:limit]
        return {"total": len(own), "held": 0, "matching": len(own), "connections": shown}

    pages = {
        str(member): document([rows[n] for n, at in enumerate(seen) if at[1] == member])
        for member in range(3)
    }
    merged = MemberDocuments(pages, PageRequest(limit)).merged(TABLES["/v1/connections"])
    alone = document(rows)
    for page in (merged, alone):
        page["connections"] = [row["received_rate"] for row in page["connections"]]
    assert merged == alone


def test_only_the_lists_that_take_the_limit_of_a_request_are_cut_off_by_it():
    lists = {
        "listeners": [{"name": "default", "host": "::", "port": 9092, "connections": 1}],
        "brokers": [{"node_id": node_id} for node_id in (2, 1)],
        "certificates": [{"section": "admin.tls", "file": "cert.pem"}],
        "unbounded_clients": [{"listener": "l", "user": None, "client_id": "a", "rate": None}],
        "clients": [row("a", 5.0)],
    }
    counts = {"bounded": 1, "throttled": 0, "held": 0, "left": 0, "shown": 1}
    values: dict[str, Any] = {
        "cluster_answers": True,
        "ready": True,
        "delay_queues": {},
        "warning": None,
    }
    figures = dict.fromkeys(("uptime_s", "followed", "pipelines_total", "unbounded"), 0)
    figures |= dict.fromkeys(("bounded", "throttled", "held"), 0)
    values |= {"config_loads": [], "request_times": [], "not_ready_reason": None}
    status = lists | values | figures | {"client_counts": counts}
    merged = MemberDocuments({"0": status, "1": status}, PageRequest(0)).merged(
        TABLES["/v1/status"]
    )
    assert {key: len(merged[key]) for key in lists} == {
        **{"listeners": 1, "brokers": 2, "certificates": 1},
        **{"unbounded_clients": 0, "clients": 0},
    }


def test_what_a_client_without_a_bound_moves_at_all_members_is_added():
    def client(name: str | None, rate: float | None) -> dict[str, Any]:
        return {"listener": "default", "user": None, "client_id": name, "rate": rate}

    tier = {
        "0": {"unbounded": 2, "unbounded_clients": [client("a", 5.0), client(None, None)]},
        "1": {
            "unbounded": 1,
            "unbounded_clients": [client("a", 7.0) | {IS_VISIT: True}, client("b", 8.0)],
        },
    }
    merged = MemberDocuments(tier, PageRequest(9)).merged(TABLES["/v1/unbounded"])
    assert merged["unbounded"] == 3
    rates = [
        (each["client_id"], each["rate"], each["member"]) for each in merged["unbounded_clients"]
    ]
    assert rates == [("a", 12.0, "0"), ("b", 8.0, "1"), (None, None, "0")]


counts_of_buckets = st.lists(st.integers(0, 50), min_size=4, max_size=4)


@given(st.lists(counts_of_buckets.filter(any), min_size=1, max_size=4))
def test_request_times_are_estimated_from_all_requests(tier: list[list[int]]):
    parts = ("broker", "proxy", "hold")
    documents = [
        {
            "api": "Fetch",
            "measured": sum(counts),
            HISTOGRAMS: {key: {"bounds": BOUNDS, "counts": counts} for key in parts},
            **{key: {"p50_s": 0.0, "p99_s": 0.0} for key in parts},
        }
        for counts in tier
    ]
    (merged,) = merged_times(documents)
    whole = [sum(column) for column in zip(*tier, strict=True)]
    assert merged["measured"] == sum(whole)
    for part in parts:
        assert merged[part] == {
            "p50_s": quantile(0.5, BOUNDS, whole),
            "p99_s": quantile(0.99, BOUNDS, whole),
        }


def test_without_histograms_the_longest_times_are_given():
    part = {"p50_s": 0.1, "p99_s": 0.2}
    short = {"api": "Fetch", "measured": 1, "broker": part, "proxy": part, "hold": part}
    long = {**short, "broker": {"p50_s": 0.05, "p99_s": 3.0}}
    (merged,) = merged_times([short, long])
    assert merged["broker"] == {"p50_s": 0.1, "p99_s": 3.0}


def test_a_chart_goes_on_over_a_handover():
    before = {"interval_s": 5.0, "rates": [9.0, 8.0, 0.0], "bounds": [(0, 10.0), (1, 20.0)]}
    after = {"interval_s": 5.0, "rates": [7.0, 6.0], "bounds": [(0, 30.0)]}
    assert merged_chart([after, None, before]) == {
        "interval_s": 5.0,
        "rates": [9.0, 8.0, 6.0],
        "bounds": [(0, 10.0), (1, 30.0)],
    }
    assert merged_chart([None, before]) == before
    assert merged_chart([None, None]) is None


@pytest.mark.parametrize(
    ("body", "client_id"),
    [
        (b'{"client_id": "etl", "name": "q"}', "etl"),
        (b'{"client_id": null, "name": "q"}', "client of q"),
        (b'{"name": "q"}', "client of q"),
        (b'{"name": "other"}', "other"),
        (b'{"client_id": 7}', None),
        (b'{"client_id": "", "name": ""}', None),
        (b"[]", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_whose_a_report_is(body: bytes, client_id: str | None):
    assert client_of_report(body, {"q": "client of q", "r": "client of r"}) == client_id
