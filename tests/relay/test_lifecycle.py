"""Every move between a pair's states, and every pause in every state, as a table."""

from itertools import combinations

import pytest

from proxy.relay.lifecycle import HELD_BACK, UNANSWERED, PairLifecycle, PairPhase, ReadPauseReason

NEW, DIALLING, OPEN = PairPhase.NEW, PairPhase.DIALLING, PairPhase.OPEN
DRAINING, LINGERING, CLOSED = (
    PairPhase.DRAINING,
    PairPhase.LINGERING,
    PairPhase.CLOSED,
)

WAYS = {
    NEW: (),
    DIALLING: (DIALLING,),
    OPEN: (DIALLING, OPEN),
    DRAINING: (DIALLING, OPEN, DRAINING),
    LINGERING: (DIALLING, OPEN, DRAINING, LINGERING),
    CLOSED: (CLOSED,),
}
"""How each state is reached from the first."""

#            to: NEW DIALLING OPEN DRAINING LINGERING CLOSED
ALLOWED = {
    NEW: (0, 1, 0, 0, 0, 1),
    DIALLING: (0, 0, 1, 0, 0, 1),
    OPEN: (0, 0, 0, 1, 0, 1),
    DRAINING: (0, 0, 0, 0, 1, 1),
    LINGERING: (0, 0, 0, 0, 0, 1),
    CLOSED: (0, 0, 0, 0, 0, 0),
}

PAUSES = (
    ReadPauseReason.FULL,
    ReadPauseReason.MUTED,
    ReadPauseReason.LOGIN,
    ReadPauseReason.GATED,
    ReadPauseReason.SERIAL,
)


def life_in(state: PairPhase) -> PairLifecycle:
    life = PairLifecycle()
    for step in WAYS[state]:
        life.move(step)
    assert life.state is state
    return life


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        pytest.param(before, after, bool(allowed), id=f"{before.value}-{after.value}")
        for before, row in ALLOWED.items()
        for after, allowed in zip(PairPhase, row, strict=True)
    ],
)
def test_moves(before, after, allowed):
    life = life_in(before)
    if allowed:
        life.move(after)
        assert life.state is after
    else:
        with pytest.raises(ValueError, match=f"from {before.value} to {after.value}"):
            life.move(after)
        assert life.state is before


@pytest.mark.parametrize("state", [state for state in PairPhase if state is not OPEN])
@pytest.mark.parametrize("pause", PAUSES)
def test_only_an_open_pair_pauses(state, pause):
    life = life_in(state)
    with pytest.raises(ValueError, match=state.value):
        life.pause(pause)
    assert life.pauses is ReadPauseReason.NONE


@pytest.mark.parametrize("pause", PAUSES)
def test_a_pause_ends_once_and_twice(pause):
    life = life_in(OPEN)
    life.pause(pause)
    life.pause(pause)
    assert life.unpause(pause)
    assert life.pauses is ReadPauseReason.NONE
    assert life.unpause(pause)


@pytest.mark.parametrize(("first", "second"), list(combinations(PAUSES, 2)))
def test_requests_are_read_when_all_pauses_have_ended(first, second):
    life = life_in(OPEN)
    life.pause(first)
    life.pause(second)
    assert not life.unpause(first)
    assert life.unpause(second)


@pytest.mark.parametrize("to", [DRAINING, CLOSED])
@pytest.mark.parametrize("pause", PAUSES)
def test_whoever_leaves_has_no_pause_and_reads_nothing(pause, to):
    life = life_in(OPEN)
    life.pause(pause)
    life.move(to)
    assert life.pauses is ReadPauseReason.NONE
    assert not life.unpause(pause)


@pytest.mark.parametrize(
    ("pause", "held_back", "unanswered"),
    [
        (ReadPauseReason.FULL, False, True),
        (ReadPauseReason.MUTED, True, False),
        (ReadPauseReason.LOGIN, False, False),
        (ReadPauseReason.GATED, True, False),
        (ReadPauseReason.SERIAL, False, True),
    ],
)
def test_whose_doing_a_pause_is(pause, held_back, unanswered):
    life = life_in(OPEN)
    assert not life.is_held_back
    life.pause(pause)
    assert life.is_held_back is held_back is (pause in HELD_BACK)
    assert (pause in UNANSWERED) is unanswered


def test_the_proxy_keeps_the_client_waiting_while_it_dials():
    assert [life_in(state).is_held_back for state in PairPhase] == [0, 1, 0, 0, 0, 0]
