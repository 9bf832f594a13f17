"""When clients are sent away, and when it is only said that something is wrong."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from proxy.health import (
    NOT_WRITABLE,
    REFUSED,
    SILENCE_GRACE_S,
    SILENT,
    UNRESOLVED,
    ReadinessProblems,
    assess_readiness,
)

NO_LOGIN = f"{REFUSED}: a wrong password"
NOW_S = 1000.0


def judged(
    silent_s: float | None = None, unresolved: Sequence[str] = (), *, writable: bool = True, **seen
) -> ReadinessProblems:
    brokers = SimpleNamespace(
        **{"refusal": None, "loop": None, **seen},
        silent_since_s=None if silent_s is None else NOW_S - silent_s,
        bootstrap=SimpleNamespace(resolver=SimpleNamespace(failing=lambda: unresolved)),
    )
    return assess_readiness(brokers, NOW_S, writable=writable)


@pytest.mark.parametrize(
    ("reachable", "was_reachable", "refusal", "silent_s", "expected"),
    [
        pytest.param(False, False, None, None, ReadinessProblems(SILENT), id="not probed yet"),
        pytest.param(
            False, False, None, 1.0, ReadinessProblems(SILENT), id="silent from the start"
        ),
        pytest.param(True, True, None, None, ReadinessProblems(), id="answers"),
        pytest.param(
            False, False, "a wrong password", None, ReadinessProblems(NO_LOGIN), id="never let in"
        ),
        pytest.param(
            *(False, True, "a wrong password", None, ReadinessProblems(warning=NO_LOGIN)),
            id="let in no longer, clients are",
        ),
        pytest.param(
            *(False, True, None, SILENCE_GRACE_S - 1, ReadinessProblems(warning=SILENT)),
            id="silent for a moment",
        ),
        pytest.param(
            False, True, None, SILENCE_GRACE_S, ReadinessProblems(SILENT), id="silent for long"
        ),
    ],
)
def test_readiness(reachable, was_reachable, refusal, silent_s, expected):
    seen = {"reachable": reachable, "was_reachable": was_reachable, "refusal": refusal}
    assert judged(**seen, silent_s=silent_s) == expected
    # What is wrong with the cluster comes first, and no client is sent away for the state.
    unkept = judged(**seen, silent_s=silent_s, writable=False)
    assert unkept == (ReadinessProblems(warning=NOT_WRITABLE) if reachable else expected)


LOOP = "proxy:9092 is this proxy itself"


@pytest.mark.parametrize(
    ("reachable", "was_reachable", "expected"),
    [
        pytest.param(False, False, ReadinessProblems(LOOP), id="nothing else"),
        pytest.param(False, True, ReadinessProblems(warning=LOOP), id="nothing else for a moment"),
        pytest.param(True, True, ReadinessProblems(warning=LOOP), id="beside a broker"),
    ],
)
def test_what_leads_to_the_proxy_itself(reachable, was_reachable, expected):
    seen = {"reachable": reachable, "was_reachable": was_reachable}
    assert judged(**seen, silent_s=1.0, loop=LOOP) == expected


def test_names_that_do_not_resolve():
    expected = ReadinessProblems(warning=f"{UNRESOLVED}: a, b")
    assert judged(unresolved=["b", "a"], reachable=True, was_reachable=True) == expected
