"""Clients that are turned away are written down one by one only up to a bound."""

from typing import Any

import pytest

from proxy.relay.rejections import (
    LINES_AT_ONCE,
    MAX_PEERS,
    MORE_REJECTED,
    REJECTED,
    REJECTION_INTERVAL_MS,
    RejectionLog,
)


class Told:
    """A log of rejections, and the lines in it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []
        self.log = RejectionLog(lambda event, **about: self.lines.append((event, about)))

    def reject(self, now_ms: float, peer: str = "10.0.0.1", reason: str = "too_long") -> None:
        self.log.rejected(reason, peer, {"peer": peer, "detail": "d"}, now_ms)

    @property
    def sums(self) -> list[dict[str, Any]]:
        return [about for event, about in self.lines if event == MORE_REJECTED]


@pytest.fixture
def told():
    return Told()


def test_each_of_a_few_has_its_line_and_no_sum(told):
    for now_ms in range(LINES_AT_ONCE):
        told.reject(now_ms)
    told.log.sweep(REJECTION_INTERVAL_MS)
    line = (REJECTED, {"reason": "too_long", "peer": "10.0.0.1", "detail": "d"})
    assert told.lines == [line] * LINES_AT_ONCE


def test_a_client_that_is_turned_away_all_the_time_has_few_lines(told):
    for now_ms in range(5000):
        told.reject(now_ms)
        told.log.sweep(now_ms)
    assert len(told.lines) == LINES_AT_ONCE
    told.log.sweep(REJECTION_INTERVAL_MS)
    more = 5000 - LINES_AT_ONCE
    assert told.sums == [{"reason": "too_long", "peer": "10.0.0.1", "more": more}]
    told.reject(REJECTION_INTERVAL_MS + 1)
    assert len(told.lines) == LINES_AT_ONCE + 2


def test_others_and_other_reasons_are_written_meanwhile(told):
    for now_ms in range(100):
        told.reject(now_ms)
    told.reject(100, peer="10.0.0.2")
    told.reject(100, reason="tls_handshake")
    assert len(told.lines) == LINES_AT_ONCE + 2


def test_many_addresses_share_lines(told):
    for number in range(10 * MAX_PEERS):
        told.reject(number, peer=f"10.0.{number // 256}.{number % 256}")
    assert len(told.lines) == MAX_PEERS + LINES_AT_ONCE
    told.log.sweep(2 * REJECTION_INTERVAL_MS)
    more = 9 * MAX_PEERS - LINES_AT_ONCE
    assert told.sums == [{"reason": "too_long", "peer": None, "more": more}]
