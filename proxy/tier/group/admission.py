"""Decide which members of a group are in the tier, and tell the others why they are not."""

from collections.abc import Mapping

from .assignment import Assignment, RefusedMember
from .subscription import Subscription
from .user_data import FormError

Subscriptions = Mapping[str, Subscription | FormError]
"""By member id in the group: what each said, or why it cannot be read."""

_Kind = tuple[str, int]
"""Cluster id and number of slots: what all members of a tier must agree on."""


def admit(
    subscriptions: Subscriptions, previous: Assignment | None
) -> tuple[dict[str, Subscription], dict[str, RefusedMember]]:
    """Return who is admitted, by name, and who is refused, by member id in the group.

    Whoever was in the tier stays in it: of two with one name the later one is refused, and of two
    clusters the one that fewer slots are owned for.
    """
    refused: dict[str, RefusedMember] = {}
    readable: dict[str, Subscription] = {}
    for key, said in sorted(subscriptions.items()):
        if isinstance(said, FormError):
            refused[key] = RefusedMember("", f"its announcement is {said}")
        else:
            readable[key] = said
    if not readable:
        return {}, refused
    admitted: dict[str, Subscription] = {}
    kind = _kind_of_tier(readable, previous)
    for key in sorted(readable, key=lambda key: _seniority(key, readable[key], previous)):
        said = readable[key]
        if _kind(said) != kind:
            refused[key] = RefusedMember(said.name, _other_kind(_kind(said), kind))
        elif said.name in admitted:
            refused[key] = RefusedMember(said.name, _same_name(said.name))
        else:
            admitted[said.name] = said
    return dict(sorted(admitted.items())), refused


def _kind(said: Subscription) -> _Kind:
    return said.cluster_id, said.slots


def _kind_of_tier(readable: Mapping[str, Subscription], previous: Assignment | None) -> _Kind:
    def rank(kind: _Kind) -> tuple[int, int, int, _Kind]:
        alike = [said for said in readable.values() if _kind(said) == kind]
        owned = sum(len(said.owned) for said in alike)
        return -owned, -sum(was_admitted(said, previous) for said in alike), -len(alike), kind

    return min(set(map(_kind, readable.values())), key=rank)


def was_admitted(said: Subscription, previous: Assignment | None) -> bool:
    """Return whether this very process was in the tier in the round before."""
    known = None if previous is None else previous.members.get(said.name)
    return known is not None and known.process == said.process


def _seniority(
    key: str, said: Subscription, previous: Assignment | None
) -> tuple[bool, int, int, str]:
    return not was_admitted(said, previous), -len(said.owned), -said.generation, key


def _other_kind(kind: _Kind, tiers: _Kind) -> str:
    cluster_id, slots = kind
    if cluster_id != tiers[0]:
        return (
            f"its clients reach cluster {cluster_id}, and those of the tier cluster {tiers[0]}: "
            "give this tier another tier.name, or correct cluster.bootstrap_servers"
        )
    return f"it has {slots} slots, and the tier has {tiers[1]}: run versions that go together"


def _same_name(name: str) -> str:
    return (
        f"another process has the machine name {name}: give each machine a name of its own, "
        "or stop the other process"
    )
