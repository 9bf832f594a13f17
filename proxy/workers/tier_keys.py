"""Carries what the keys of a tier are made of through its state, so that all have the same ones."""

import json
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from proxy.members.client_set import ClientSet
from proxy.quota.entities import QuotaKind
from proxy.quota.rules import AdaptiveBound, Rule
from proxy.state import Record, StateError, Store
from proxy.workers.shared_keys import KeyRules

KEYS_KEY = "tier/keys"
"""Of the record, in the common slot."""

VERSION = 1
"""Of the record's form."""

DIGEST_CHARS = 12


def text_of(rules: KeyRules) -> str:
    """Return what keys are made of as text; the same text makes the same keys."""
    sets = [[each.name, sorted(each.client_ids), list(each.prefixes)] for each in rules.together]
    return json.dumps([[_document(rule) for rule in rules.rules], sets], separators=(",", ":"))


def digest_of(rules: KeyRules) -> str:
    """Return some characters that differ where the keys may."""
    return sha256(text_of(rules).encode()).hexdigest()[:DIGEST_CHARS]


def keys_record(rules: KeyRules) -> Record:
    """Return the record that `read_keys` reads."""
    packed = b64encode(zlib.compress(text_of(rules).encode())).decode()
    return Record.of(KEYS_KEY, packed, VERSION)


def read_keys(store: Store) -> KeyRules | None:
    """Return what the keys of the tier are made of; None: nobody has written it yet.

    Raises StateError: it cannot be read.
    """
    record = store.get(KEYS_KEY)
    if record is None:
        return None
    try:
        record.check_form(VERSION)
        rules, sets = json.loads(zlib.decompress(b64decode(str(record.value))))
        together = tuple(ClientSet(name, frozenset(ids), tuple(more)) for name, ids, more in sets)
        return KeyRules(tuple(_rule(each) for each in rules), together)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise StateError(
            f"the rules that the tier goes by cannot be read: {error}",
            "run versions that go together on all machines of the tier",
        ) from error


def _document(rule: Rule) -> dict[str, Any]:
    """Return of a rule what keys follow from."""
    names = ("user", "client_id", "client_id_prefix", "listener", "scope", "number")
    return {
        **{name: value for name in names if (value := getattr(rule, name)) is not None},
        "bounds": {kind.value: bound for kind, bound in rule.bounds.items()},
        "adaptive": rule.adaptive is not None,
    }


def _rule(document: Mapping[str, Any]) -> Rule:
    bounds = {QuotaKind(kind): bound for kind, bound in document["bounds"].items()}
    adaptive = AdaptiveBound() if document["adaptive"] else None
    return Rule(**{**document, "bounds": bounds, "adaptive": adaptive})
