"""What `check` says of rules that leave something open to clients that no rule names."""

import pytest

from proxy.config.check_report import find_rule_gaps, find_unenforced
from proxy.quota.entities import DEFAULT, QuotaKind
from proxy.quota.rules import QuotaManagerSettings, Rule, RuleTable

CONSUMER, PRODUCER, *_ = QuotaKind
OPEN = "no rule bounds clients that no rule names"
MEND = "; fix: add {client-id: <default>, ...}, which is for all of them"


def rule(number=0, /, kind=CONSUMER, **keys):
    return Rule(bounds={kind: 1.0}, number=number, **keys)


def anew(titles):
    return (
        f"{titles}: with each new client id a client gets this quota anew, up to 7 times "
        "(limits.max_client_entities); fix: scope: shared, or, where clients log in, a rule with "
        "user: <default>"
    )


EACH = rule(0, client_id=DEFAULT)
SHARED = rule(0, client_id=DEFAULT, scope="shared")
USERS = rule(1, user=DEFAULT)


@pytest.mark.parametrize(
    ("rules", "lines"),
    [
        pytest.param([], [OPEN + MEND], id="no rule"),
        pytest.param(
            [rule(0, client_id="etl"), rule(1, client_id_prefix="etl-"), rule(2, user="alice")],
            [OPEN + MEND],
            id="only names",
        ),
        pytest.param([SHARED], [], id="one for all"),
        pytest.param([SHARED, rule(1, client_id="etl")], [], id="one for all others"),
        pytest.param([EACH], [anew("rule 0")], id="one for each"),
        pytest.param([EACH, USERS], [], id="one for each user"),
        pytest.param(
            [EACH, rule(1, PRODUCER, user=DEFAULT)], [anew("rule 0")], id="users for another quota"
        ),
        pytest.param([EACH, rule(1, user="alice")], [anew("rule 0")], id="one user only"),
        pytest.param([USERS], [f"{OPEN} and do not log in{MEND}"], id="users alone"),
        pytest.param(
            [rule(0, user=DEFAULT, client_id=DEFAULT)],
            [f"{OPEN} and do not log in{MEND}", anew("rule 0")],
            id="each client id of each user",
        ),
        pytest.param([SHARED, rule(1, user="alice", client_id=DEFAULT)], [], id="a user by name"),
        pytest.param(
            [rule(0, listener="a")],
            [f"{OPEN} on listener b{MEND}", anew("rule 0")],
            id="a listener",
        ),
        pytest.param(
            [rule(0, listener="a", scope="shared"), rule(1, listener="b", scope="shared")],
            [],
            id="all listeners",
        ),
        pytest.param(
            [rule(0, listener="a"), rule(1, client_id=DEFAULT)],
            [anew("rule 0, rule 1")],
            id="a listener before the default",
        ),
        pytest.param(
            [rule(0, client_id=DEFAULT), rule(1, PRODUCER, client_id="etl")],
            [anew("rule 0")],
            id="one kind of quota is enough",
        ),
    ],
)
def test_gaps(rules, lines):
    assert list(find_rule_gaps(RuleTable(rules), ["a", "b"], 7)) == lines


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (QuotaManagerSettings(rules=(EACH,)), None),
        (
            QuotaManagerSettings(rules=(EACH,), enforce=False),
            "throttle.enforce is false: no client",
        ),
        (
            QuotaManagerSettings(rules=(EACH, rule(1, user="anna", enforce=False))),
            "rule 1: enforce is false, so their clients are not held",
        ),
    ],
)
def test_what_is_not_enforced_is_said(settings, line):
    lines = list(find_unenforced(settings))
    assert [each.startswith(line) for each in lines] == ([] if line is None else [True])
