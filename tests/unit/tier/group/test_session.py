"""What the coordinator's errors ask for, and what is logged of a tier."""

import pytest
from structlog.testing import capture_logs
from tier_machines import announcement

from proxy.cluster.kafka_client import Bootstrap
from proxy.state import GroupFence
from proxy.tier.group.group_documents import AnnouncedMember, Assignment, RefusedMember
from proxy.tier.group.group_member import SESSION_TIMEOUT_S, GroupMember, log_oddities
from proxy.tier.group.group_protocol import Meaning, explain_refusal, meaning_of
from proxy.tier.group.slot_states import SlotStates
from proxy.tier.slot_map import SlotMap

FENCE = GroupFence("tier", 1, "id", "a")


@pytest.fixture
async def group_member() -> GroupMember:
    async def release(_: frozenset[int]) -> None:
        pass

    async def never(_: int) -> bool:
        return False

    return GroupMember(
        Bootstrap([("kafka", 9092)]),
        "tier",
        SlotStates(),
        lambda: announcement("a"),
        on_assigned=lambda: None,
        on_revoked=release,
        on_lost=lambda: None,
        may_hold=never,
    )


async def test_a_session_lasts_from_when_the_last_answered_request_was_sent(
    group_member: GroupMember,
) -> None:
    group_member._extend_session(100.0)
    group_member._extend_session(99.0)  # a round that took longer than the heartbeats beside it
    assert group_member._session_ends_s == 100.0 + SESSION_TIMEOUT_S


@pytest.mark.parametrize(
    ("error_code", "meaning", "text"),
    [
        (16, Meaning.MOVED, "NOT_COORDINATOR"),
        (14, Meaning.MOVED, "COORDINATOR_LOAD_IN_PROGRESS"),
        (22, Meaning.REJOIN, "ILLEGAL_GENERATION"),
        (25, Meaning.UNKNOWN, "UNKNOWN_MEMBER_ID"),
        (26, Meaning.NEVER, "let group.min.session.timeout.ms be 10000 at most"),
        (27, Meaning.REJOIN, "REBALANCE_IN_PROGRESS"),
        (30, Meaning.LATER, "it needs the right Read on it"),
        (79, Meaning.REJOIN, "MEMBER_ID_REQUIRED"),
        (81, Meaning.LATER, "group.max.size"),
        (82, Meaning.FENCED, "another process has joined group tier as machine a"),
        (23, Meaning.NEVER, "give the tier another name"),
        (-1, Meaning.LATER, "group tier: "),
    ],
)
def test_each_error_says_what_to_do(error_code: int, meaning: Meaning, text: str) -> None:
    assert meaning_of(error_code) is meaning
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


async def test_one_failure_by_itself_is_no_problem(group_member: GroupMember) -> None:
    with capture_logs() as lines:
        group_member._failed("moved")
        assert group_member.problem is None
        group_member._failed("moved")
        group_member._failed("moved")
        assert group_member.problem == "moved"
        group_member._set_problem(None)
    assert [line["event"] for line in lines] == ["not sure of the tier", "in the tier again"]
