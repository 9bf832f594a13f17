"""A broker that fails is written down once, and then summed up."""

from typing import Any

import pytest

from proxy.relay.log_limiter import (
    FAILING,
    MAX_BROKERS,
    OVER,
    OVER_AFTER_MS,
    SUM_INTERVAL_MS,
    OutageLog,
)

FAILED = "upstream failed"


class Written:
    """A log of outages, and the lines in it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.outages = OutageLog(lambda event, **about: self.lines.append((event, about)))

    def fail(self, now_ms: float, node_id: int | None = 1, reason: str = "refused") -> None:
        self.outages.failed(node_id, reason, FAILED, {"peer": "127.0.0.1"}, now_ms)

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.lines]


@pytest.fixture
def written():
    return Written()


def test_one_line_for_many_failures_and_one_when_they_are_over(written):
    for number in range(890):
        written.fail(number * 5.0, reason="timeout" if number % 2 else "refused")
        written.outages.sweep(number * 5.0)
    assert written.lines == [
        (FAILED, {"node_id": 1, "reason": "refused", "peer": "127.0.0.1"}),
    ]
    written.outages.sweep(889 * 5.0 + OVER_AFTER_MS)
    assert written.lines[1:] == [
        (
            OVER,
            {
                "node_id": 1,
                "failures": 890,
                "more": 889,
                "reasons": {"timeout": 445, "refused": 444},
                "lasted_s": 4.4,
            },
        )
    ]


def test_a_long_outage_is_summed_up_each_minute(written):
    for second in range(151):
        written.fail(second * 1000.0)
        written.outages.sweep(second * 1000.0)
    assert written.events == [FAILED, FAILING, FAILING]
    assert [about["more"] for _, about in written.lines[1:]] == [60, 60]
    assert written.lines[2][1]["failures"] == 121
    assert 2 * SUM_INTERVAL_MS < 150_000.0


def test_a_single_failure_needs_no_second_line(written):
    written.fail(0.0)
    written.outages.sweep(OVER_AFTER_MS)
    assert written.events == [FAILED]


def test_the_next_outage_of_a_broker_is_a_new_one(written):
    written.fail(0.0)
    written.outages.sweep(OVER_AFTER_MS)
    written.fail(OVER_AFTER_MS + 1)
    assert written.events == [FAILED, FAILED]


def test_each_broker_has_its_own(written):
    for node_id in (1, 2, None, 1, 2, None):
        written.fail(0.0, node_id)
    assert [about["node_id"] for _, about in written.lines] == [1, 2, None]


def test_brokers_that_clients_make_up_share_a_line(written):
    for node_id in range(MAX_BROKERS + 100):
        written.fail(0.0, node_id)
    assert len(written.lines) == MAX_BROKERS + 1
    assert written.lines[-1][1]["node_id"] is None
