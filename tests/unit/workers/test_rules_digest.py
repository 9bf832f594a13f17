"""Members with the same rules show the same digest, and others another one."""

from dataclasses import replace

from proxy.quota.entities import QuotaKind
from proxy.quota.pauses import QuotaPause
from proxy.quota.rules import AdaptiveBound, Rule, RuleTable
from proxy.workers.rules_digest import digest_of

READ = QuotaKind.CONSUMER_BYTE_RATE
ONE = Rule(client_id="a", bounds={READ: 1000.0}, number=1, place="here:1")
OTHER = Rule(user="u", bounds={READ: 1000.0, QuotaKind.PRODUCER_BYTE_RATE: 5.0}, number=2)


def digest(table: RuleTable) -> str:
    return digest_of(table, enforce=True)


def test_where_a_rule_stands_does_not_matter():
    moved = [replace(OTHER, number=1), replace(ONE, number=2, place="there:9")]
    assert digest(RuleTable([ONE, OTHER])) == digest(RuleTable(moved))


def test_all_that_holds_clients_matters():
    pause = QuotaPause({"client-id": "a"}, 1e9)
    tables = [
        RuleTable([]),
        RuleTable([ONE]),
        RuleTable([ONE, OTHER]),
        RuleTable([ONE], pauses=[pause]),
        RuleTable([replace(ONE, client_id="b")]),
        RuleTable([replace(ONE, bounds={READ: 1001.0})]),
        RuleTable([replace(ONE, enforce=False)]),
        RuleTable([replace(ONE, adaptive=AdaptiveBound(min_rate=5.0))]),
        RuleTable([replace(ONE, number=1), replace(ONE, number=2, bounds={READ: 1.0})]),
        RuleTable([replace(ONE, number=2), replace(ONE, number=1, bounds={READ: 1.0})]),
    ]
    assert len({digest(table) for table in tables}) == len(tables)
    assert digest_of(tables[0], enforce=False) != digest(tables[0])
