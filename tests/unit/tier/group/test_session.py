"""What the coordinator's errors ask for, and what is logged of a tier."""

import pytest
from structlog.testing import capture_logs

from proxy.state import GroupFence
from proxy.tier.group.group_documents import AnnouncedMember, Assignment, RefusedMember
from proxy.tier.group.group_member import SESSION_TIMEOUT_S, GroupSessionHealth, log_oddities
from proxy.tier.group.group_protocol import ErrorAction, action_for_error, explain_refusal
from proxy.tier.slot_map import SlotMap

FENCE = GroupFence("tier", 1, "id", "a")


def test_a_session_lasts_from_when_the_last_answered_request_was_sent() -> None:
    session = GroupSessionHealth("tier", SESSION_TIMEOUT_S)
    session.extend(100.0)
    session.extend(99.0)  # a round that took longer than the heartbeats beside it
    assert session.ends_s == 100.0 + SESSION_TIMEOUT_S


@pytest.mark.parametrize(
    ("error_code", "meaning", "text"),
    [
        (16, ErrorAction.MOVED, "NOT_COORDINATOR"),
        (14, ErrorAction.MOVED, "COORDINATOR_LOAD_IN_PROGRESS"),
        (22, ErrorAction.REJOIN, "ILLEGAL_GENERATION"),
        (25, ErrorAction.UNKNOWN, "UNKNOWN_MEMBER_ID"),
        (26, ErrorAction.NEVER, "let group.min.session.timeout.ms be 10000 at most"),
        (27, ErrorAction.REJOIN, "REBALANCE_IN_PROGRESS"),
        (30, ErrorAction.LATER, "it needs the right Read on it"),
        (79, ErrorAction.REJOIN, "MEMBER_ID_REQUIRED"),
        (81, ErrorAction.LATER, "group.max.size"),
        (82, ErrorAction.NEVER, "another process has joined group tier as machine a"),
        (23, ErrorAction.NEVER, "give the tier another name"),
        (-1, ErrorAction.LATER, "group tier: "),
    ],
)
def test_each_error_says_what_to_do(error_code: int, meaning: ErrorAction, text: str) -> None:
    assert action_for_error(error_code) is meaning
    assert text in explain_refusal(error_code, FENCE, 10.0)


def test_what_is_odd_about_the_tier_is_logged_once() -> None:
    odd = Assignment(
        1,
        SlotMap({}, ()),
        members={
            "a": AnnouncedMember("x", "p", "d1", 0),
            "b": AnnouncedMember("y", "q", "d2", 7200),
        },
        refused={"id": RefusedMember("c", "why")},
    )
    with capture_logs() as lines:
        log_oddities(odd, None, "mine")
        log_oddities(odd, odd, "mine")
    assert [line["event"] for line in lines] == [
        "machines of the tier have different rules",
        "clocks of the tier are far apart",
        "the tier refuses a machine",
    ]
    assert lines[0]["machines_by_digest"] == {"d1": ["a"], "d2": ["b"]}


def test_one_failure_by_itself_is_no_problem() -> None:
    session = GroupSessionHealth("tier", SESSION_TIMEOUT_S)
    with capture_logs() as lines:
        session.failed("moved")
        assert session.problem is None
        session.failed("moved")
        session.failed("moved")
        assert session.problem == "moved"
        session.set_problem(None)
    assert [line["event"] for line in lines] == ["not sure of the tier", "in the tier again"]
