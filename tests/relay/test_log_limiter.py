"""What clients can cause of log lines is written one by one only up to a bound."""

from typing import Any

import pytest

from proxy.relay.log_limiter import LINES_AT_ONCE, MAX_PEERS, MORE, SUM_AFTER_MS, LogLimiter

REJECTED = "client rejected"


class Lines:
    """A log with its lines."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, dict[str, Any]]] = []

    def warning(self, event: str, /, **about: Any) -> None:
        self.all.append(("warning", event, about))

    def error(self, event: str, /, **about: Any) -> None:
        self.all.append(("error", event, about))


class Told:
    """A limiter, and what passed it."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log = Lines()
        self.limiter = LogLimiter(self.log, lambda: self.now_ms)

    def reject(self, peer: str = "10.0.0.1", reason: str = "too_long") -> None:
        self.limiter.warning(REJECTED, peer=peer, reason=reason, detail="d")

    @property
    def count(self) -> int:
        return len(self.log.all)

    @property
    def sums(self) -> list[dict[str, Any]]:
        return [about for _, event, about in self.log.all if event == MORE]


@pytest.fixture
def told():
    return Told()


def test_each_of_a_few_has_its_line_and_no_sum(told):
    for _ in range(LINES_AT_ONCE):
        told.reject()
    told.now_ms = SUM_AFTER_MS
    told.limiter.sweep()
    line = ("warning", REJECTED, {"reason": "too_long", "peer": "10.0.0.1", "detail": "d"})
    assert told.log.all == [line] * LINES_AT_ONCE


def test_a_client_that_is_turned_away_all_the_time_has_few_lines(told):
    for now_ms in range(5000):
        told.now_ms = now_ms
        told.reject()
        told.limiter.sweep()
    assert told.count == LINES_AT_ONCE
    told.now_ms = SUM_AFTER_MS
    told.limiter.sweep()
    more = 5000 - LINES_AT_ONCE
    about = {"of": REJECTED, "reason": "too_long", "peer": "10.0.0.1", "more": more}
    assert told.log.all[LINES_AT_ONCE:] == [("warning", MORE, about)]
    told.reject()
    assert told.count == LINES_AT_ONCE + 2


def test_others_other_reasons_and_other_events_are_written_meanwhile(told):
    for _ in range(100):
        told.reject()
    told.reject(peer="10.0.0.2")
    told.reject(reason="tls_handshake")
    told.limiter.warning("another event", peer="10.0.0.1", reason="too_long")
    told.limiter.error(REJECTED, peer="10.0.0.1", reason="too_long")
    assert told.count == LINES_AT_ONCE + 4


def test_a_sum_has_the_level_of_its_lines(told):
    for _ in range(LINES_AT_ONCE + 1):
        told.limiter.error("unexpected error", peer="10.0.0.1", reason="internal_error")
    told.now_ms = SUM_AFTER_MS
    told.limiter.sweep()
    assert {level for level, _, _ in told.log.all} == {"error"}
    assert told.sums[0]["more"] == 1


def test_many_addresses_share_lines(told):
    for number in range(10 * MAX_PEERS):
        told.reject(peer=f"10.0.{number // 256}.{number % 256}")
    assert told.count == MAX_PEERS + LINES_AT_ONCE
    told.now_ms = SUM_AFTER_MS
    told.limiter.sweep()
    more = 9 * MAX_PEERS - LINES_AT_ONCE
    assert told.sums == [{"of": REJECTED, "reason": "too_long", "peer": None, "more": more}]
