"""What is to be mended before a query's batches are shaped: said once for each run, in words."""

import pytest

from proxy.backpressure.query_advice import update_query_advice
from proxy.progress.events import ProgressEvent, ProgressEventKind
from proxy.progress.query import FollowedQuery, LastBatch
from proxy.progress.report import ReportedTrigger
from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.rules import AdaptiveSettings, Rule, RuleTable

BOUNDS = {QuotaKind.CONSUMER_BYTE_RATE: 1e6}
TWO_SECONDS = AdaptiveSettings(batch_interval_ms=2000.0)
EACH_TWO_SECONDS = ReportedTrigger(kind="processing_time", interval_ms=2000.0)


def ignore(*_: object) -> None: ...


def make(
    client_id="etl", name="orders", batches=0, rows=5, trigger=None, on_event=ignore
) -> FollowedQuery:
    query = FollowedQuery(client_id, on_event, changed=ignore)
    query.name = name
    list(query.beginning_run("run", None, 0.0))
    query.reported_name = name
    if trigger is not None:
        query.trigger_kind, query.trigger_interval_ms = trigger.kind, trigger.interval_ms
    query.run_batches = batches
    query.last_batch = LastBatch(batches, rows, 100, 0.0) if batches else None
    return query


def find(query, *rules, identity=None, is_followed=False, known=("etl",)) -> dict[str, str]:
    table = RuleTable(rules)
    match = table.match(QuotaKind.CONSUMER_BYTE_RATE, identity) if identity is not None else None
    update_query_advice(
        query,
        table,
        match and match.rule,
        is_followed=is_followed,
        knows_client=known.__contains__,
        now_ms=1.0,
    )
    return {str(note.kind): note.text for note in query.advice.values()}


def rule(client_id="etl", adaptive=TWO_SECONDS, **more) -> Rule:
    return Rule(client_id=client_id, bounds=BOUNDS, adaptive=adaptive, number=3, **more)


PREFIX = Rule(client_id_prefix="et", bounds=BOUNDS)
OF_USER = Rule(user="alice", bounds=BOUNDS)


@pytest.mark.parametrize(
    ("rules", "is_followed", "expected"),
    [
        pytest.param([rule()], False, None, id="adaptive rule"),
        pytest.param([rule(adaptive=None)], False, None, id="plain rule"),
        pytest.param([PREFIX], False, None, id="prefix"),
        pytest.param([rule(DEFAULT)], False, None, id="adaptive for all"),
        pytest.param([], True, None, id="followed"),
        pytest.param([], False, "add a rule for it", id="nothing"),
        pytest.param([rule(DEFAULT, None), OF_USER], False, "add a rule", id="others' rules"),
        pytest.param([rule("orders")], False, "rule 3 is for 'orders', the", id="query's name"),
    ],
)
def test_rules_name_the_client(rules, is_followed, expected):
    found = find(make(), *rules, is_followed=is_followed).get("names")
    assert expected in found if expected else found is None


@pytest.mark.parametrize(
    ("query", "known", "expected"),
    [
        pytest.param(make(batches=2), ["etl"], None, id="connected"),
        pytest.param(make(batches=2), ["orders"], "a client 'orders' has, so", id="by its name"),
        pytest.param(make(batches=2), [], "set kafka.client.id to 'etl'", id="past the proxy"),
        pytest.param(make(batches=1), [], None, id="the proxy may have been away"),
        pytest.param(make(batches=2, rows=0), [], None, id="nothing was read"),
    ],
)
def test_the_client_has_connected(query, known, expected):
    found = find(query, rule(), known=known).get("names")
    assert expected in found if expected else found is None


@pytest.mark.parametrize(
    ("query", "known", "rules", "advice", "is_outside"),
    [
        pytest.param(make(batches=2), [], [], None, True, id="past the proxy"),
        pytest.param(make(batches=2), [], [rule(DEFAULT, None)], None, True, id="others' rules"),
        pytest.param(make(batches=1), [], [], None, False, id="it may connect yet"),
        pytest.param(make(batches=2), ["etl"], [], "add a rule", False, id="connected"),
        pytest.param(make(batches=2), ["orders"], [], "a client 'orders' has", False, id="name"),
        pytest.param(make(batches=2), [], [rule()], "set kafka.client.id", False, id="a rule"),
        pytest.param(make(batches=2), [], [rule("orders")], "set kafka.client.id", False, id="of"),
    ],
)
def test_a_query_that_nobody_names_may_be_meant_to_read_past_the_proxy(
    query, known, rules, advice, is_outside
):
    found = find(query, *rules, known=known).get("names")
    assert query.is_outside is is_outside
    assert advice in found if advice else found is None


@pytest.mark.parametrize(
    ("trigger", "interval_ms", "expected"),
    [
        pytest.param(EACH_TWO_SECONDS, 2000.0, {}, id="the same"),
        pytest.param(None, 2000.0, {}, id="not known"),
        pytest.param(
            ReportedTrigger(kind="processing_time", interval_ms=0), 2000.0, {}, id="no interval"
        ),
        pytest.param(
            EACH_TWO_SECONDS,
            500.0,
            {
                "interval": "batch_interval is 0.5 s, but the query's trigger fires every 2 s: "
                "write batch_interval: 2s, or give the query processingTime='0.5 seconds'"
            },
            id="another",
        ),
        pytest.param(
            ReportedTrigger(kind="continuous", interval_ms=1000), 2000.0, {"trigger": "no batch"}
        ),
        pytest.param(ReportedTrigger(kind="available_now"), 2000.0, {"trigger": "availableNow"}),
        pytest.param(ReportedTrigger(kind="once"), 2000.0, {"trigger": "the trigger once"}),
        pytest.param(ReportedTrigger(kind="real_time"), 2000.0, {"trigger": "real-time trigger"}),
        pytest.param(ReportedTrigger(kind="whenever"), 2000.0, {"trigger": "not known to this"}),
        pytest.param(ReportedTrigger(kind="once"), None, {}, id="no rule is adaptive"),
    ],
)
def test_the_trigger(trigger, interval_ms, expected):
    adaptive = AdaptiveSettings(batch_interval_ms=interval_ms) if interval_ms is not None else None
    found = find(make(trigger=trigger), rule(adaptive=adaptive))
    assert found.keys() == expected.keys()
    for kind, part in expected.items():
        assert part in found[kind]


def test_of_several_rules_that_of_the_client_tells_the_interval():
    query = make(trigger=ReportedTrigger(kind="processing_time", interval_ms=9000))
    rules = [rule(user="alice"), rule(adaptive=AdaptiveSettings(batch_interval_ms=9000.0))]
    assert "write batch_interval: 9s" in find(query, *rules)["interval"]  # which is not known yet
    assert find(query, *rules, identity=ClientIdentity("default", None, "etl")) == {}
    assert find(query, *rules, identity=ClientIdentity("default", "alice", "etl"))


def test_each_is_said_once_for_a_run_and_goes_when_it_is_mended():
    events: list[ProgressEvent] = []
    trigger = ReportedTrigger(kind="processing_time", interval_ms=9000)
    query = make(trigger=trigger, on_event=events.append)
    two, three, nine = (
        rule(adaptive=AdaptiveSettings(batch_interval_ms=interval_ms))
        for interval_ms in (2e3, 3e3, 9e3)
    )
    assert "batch_interval is 2 s" in find(query, two)["interval"]
    assert "batch_interval is 3 s" in find(query, three)["interval"]
    assert find(query, nine) == {}
    find(query, two)
    assert [event.kind for event in events] == [ProgressEventKind.INTERVAL]
    list(query.beginning_run("another run", 5.0, 5.0))
    assert list(query.advice) == []
    find(query)
    assert [event.kind for event in events] == [ProgressEventKind.INTERVAL, ProgressEventKind.NAMES]
