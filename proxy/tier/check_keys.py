"""What the command `check` prints of quota keys, and of what several members have parts of."""

from collections.abc import Iterator

from proxy.config import Config
from proxy.quota.entities import FORESEEN_KINDS, TRAFFIC_KINDS, ClientIdentity
from proxy.quota.rules import RuleTable
from proxy.tier.key_rules import client_sets
from proxy.tier.quota_keys import QuotaKeys

MEND = "fix: count by what tells these clients apart, for example client-id, or divide it by hand"


def keys_of(config: Config, table: RuleTable) -> QuotaKeys:
    """Return the keys by which members share the clients."""
    return QuotaKeys(table.rules, client_sets(config))


def find_key_hints(config: Config, table: RuleTable, keys: QuotaKeys) -> Iterator[str]:
    """Yield a line for each rule of which every member has the whole number of connections."""
    for rule in table.rules if config.tier is not None else ():
        counted = [kind for kind in rule.bounds if kind not in TRAFFIC_KINDS]
        if counted and keys.is_divided(rule):
            yield (
                f"{rule.title}: its clients are at several members, each of which allows "
                f"{' and '.join(counted)} by itself; {MEND}"
            )


def explain_key(
    config: Config, table: RuleTable, keys: QuotaKeys, identity: ClientIdentity
) -> Iterator[str]:
    """Yield a client's quota key with its slot, and what it shares with clients of others."""
    yield f"quota key: {keys.key_of(identity)!r}, slot {keys.slot_of(identity)}"
    matches = [table.match(kind, identity) for kind in TRAFFIC_KINDS]
    rules = [match.rule for match in matches if match is not None]
    for kind in sorted(FORESEEN_KINDS):
        rules += table.rules_by_topic(kind, identity)
    divided = {rule.title for rule in rules if config.tier is not None and keys.is_divided(rule)}
    for title in sorted(divided):
        yield f"     {title}: each member that serves its clients has a part of what they share"
