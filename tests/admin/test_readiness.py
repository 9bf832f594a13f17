"""When clients are sent away, and when it is only said that something is wrong."""

import pytest

from proxy.health import (
    NOT_WRITABLE,
    REFUSED,
    SILENCE_GRACE_S,
    SILENT,
    UNRESOLVED,
    Readiness,
    judge,
)

NO_LOGIN = f"{REFUSED}: a wrong password"


@pytest.mark.parametrize(
    ("reachable", "was_reachable", "refusal", "silent_s", "expected"),
    [
        pytest.param(False, False, None, None, Readiness(SILENT), id="not probed yet"),
        pytest.param(False, False, None, 1.0, Readiness(SILENT), id="silent from the start"),
        pytest.param(True, True, None, None, Readiness(), id="answers"),
        pytest.param(
            False, False, "a wrong password", None, Readiness(NO_LOGIN), id="never let in"
        ),
        pytest.param(
            *(False, True, "a wrong password", None, Readiness(warning=NO_LOGIN)),
            id="let in no longer, clients are",
        ),
        pytest.param(
            *(False, True, None, SILENCE_GRACE_S - 1, Readiness(warning=SILENT)),
            id="silent for a moment",
        ),
        pytest.param(False, True, None, SILENCE_GRACE_S, Readiness(SILENT), id="silent for long"),
    ],
)
def test_readiness(reachable, was_reachable, refusal, silent_s, expected):
    seen = {"reachable": reachable, "was_reachable": was_reachable, "refusal": refusal}
    assert judge(**seen, silent_s=silent_s, writable=True) == expected
    # What is wrong with the cluster comes first, and no client is sent away for the state.
    unkept = judge(**seen, silent_s=silent_s, writable=False)
    assert unkept == (Readiness(warning=NOT_WRITABLE) if reachable else expected)


LOOP = "proxy:9092 is this proxy itself"


@pytest.mark.parametrize(
    ("reachable", "was_reachable", "expected"),
    [
        pytest.param(False, False, Readiness(LOOP), id="nothing else"),
        pytest.param(False, True, Readiness(warning=LOOP), id="nothing else for a moment"),
        pytest.param(True, True, Readiness(warning=LOOP), id="beside a broker"),
    ],
)
def test_what_leads_to_the_proxy_itself(reachable, was_reachable, expected):
    seen = {"reachable": reachable, "was_reachable": was_reachable, "refusal": None}
    assert judge(**seen, silent_s=1.0, loop=LOOP, writable=True) == expected


def test_names_that_do_not_resolve():
    seen = {"reachable": True, "was_reachable": True, "refusal": None, "silent_s": None}
    expected = Readiness(warning=f"{UNRESOLVED}: a, b")
    assert judge(**seen, unresolved=["b", "a"], writable=True) == expected
