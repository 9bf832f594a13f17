"""What the command `check` prints of quota keys: a client's, and one that all clients have."""

from collections.abc import Iterator
from itertools import product, starmap

from proxy.config import Config
from proxy.quota.entities import DEFAULT, ClientIdentity, QuotaKind
from proxy.quota.rules import RuleTable
from proxy.tier.key_rules import client_sets
from proxy.tier.keys.quota_keys import QuotaKeys

STRANGERS = ("a", "b")
"""Stand for users and client ids that nothing names."""

MEND_QUERIES = (
    "a user may come with the client id of any query or pipeline, so all users share with those; "
    "fix: write client-id: <default> beside user, or rules for client ids alone"
)
MEND = "fix: bound them by rules that share nothing, for example scope: each, or write workers: 1"


def keys_of(config: Config, table: RuleTable) -> QuotaKeys:
    """Return the keys by which workers share the clients."""
    return QuotaKeys(table.rules, client_sets(config), table)


def find_key_hints(config: Config, table: RuleTable, keys: QuotaKeys) -> Iterator[str]:
    """Yield a line if all clients that rules bound must be at one of several members.

    A rule with a topic and without a client is for all of them, whatever other rules say.
    """
    for_all = [rule for rule in table.rules if rule.is_by_topic and not rule.names_clients]
    if config.tier is not None and for_all:
        titles = ", ".join(rule.title for rule in for_all)
        yield (
            f"{titles}: a topic's bound for all clients together is kept by one member, which "
            f"serves them all; fix: add client-id: {DEFAULT}, a bound for each, or name the clients"
        )
        return
    if config.worker_count == 1:
        return
    bounded: set[ClientIdentity] = set()
    found: set[str] = set()
    for client in _possible_clients(config, table):
        kinds = list(QuotaKind)
        if any(table.match(each, client) or table.rule_by_topic(each, client) for each in kinds):
            bounded.add(client)
            found.add(keys.key_of(client))
            if len(found) > 1:
                return
    if len(bounded) > 1:
        those = keys.explain(next(iter(bounded)))
        with_users = any(rule.user is not None and rule.client_id is None for rule in table.rules)
        sets = client_sets(config)
        yield (
            f"workers: {config.worker_count}: one of them serves all clients that rules bound, as "
            f"they have one quota key ({those}): "
            f"{MEND_QUERIES if with_users and sets else MEND}"
        )


def explain_key(keys: QuotaKeys, identity: ClientIdentity) -> Iterator[str]:
    """Yield a client's quota key with its slot, and who else has it."""
    key = keys.key_of(identity)
    yield f"quota key: {key!r}, slot {keys.slot_of(identity)}"
    yield f"     of {keys.explain(identity)}"


def _possible_clients(config: Config, table: RuleTable) -> Iterator[ClientIdentity]:
    """Yield some whom nothing names, then one or more for each rule and query."""
    listeners, users = [listener.name for listener in config.listeners], (None, *STRANGERS)
    yield from starmap(ClientIdentity, product(listeners, users, STRANGERS))
    for clients in client_sets(config):
        yield from starmap(ClientIdentity, product(listeners[:1], users, clients.client_ids))
    for rule in table.rules:
        user = STRANGERS[0] if rule.user == DEFAULT else rule.user
        for suffix in STRANGERS:
            client_id = suffix if rule.client_id in (None, DEFAULT) else rule.client_id
            if rule.client_id_prefix is not None:
                client_id = rule.client_id_prefix + suffix
            yield ClientIdentity(rule.listener or listeners[0], user, client_id)
