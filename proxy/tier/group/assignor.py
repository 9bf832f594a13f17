"""Assign the slots of a tier, so that nobody gets one that another member may still have.

As in Kafka's cooperative rebalancing (KIP-429) a slot moves in two rounds: in the first its owner
is told to release it, in the second, which begins when that is done, it is given away: to whom, and
what each slot carries, goes with the assignment, as another member may lead then. A member's
subscription may be older than what it got since: Kafka keeps a static member that does not rejoin
in time, with the subscription it had. The leader then counts what the round before gave to it. One
that does not know the round before counts no older one, not even for itself: others may have got
those slots since. It gives away nothing until each member was heard again.
"""

from collections.abc import Mapping

from structlog import get_logger

from metrics.member_names import machine_of
from proxy.tier.slot_balance import Owners, Placement, SlotLoad
from proxy.tier.slot_map import SlotMap

from .group_documents import AnnouncedMember, Assignment, RefusedMember, Subscription, UserDataError

LARGE_GROUP_BYTES = 512 * 2**10
"""The coordinator keeps what all members said and got in one record, of 1 MiB at most by default
(message.max.bytes)."""

Subscriptions = Mapping[str, Subscription | UserDataError]
"""By member id in the group: what each said, or why it cannot be read."""

_Kind = tuple[str, int]
"""Cluster id and number of slots: what all members of a tier must agree on."""

_Claims = Mapping[int, tuple[Subscription, bool]]
"""By slot: who has it, as far as is known, and whether it is being released."""

_log = get_logger(__name__)


def sync_group_assignments(
    said: Mapping[str, bytes], newest: Assignment | None, generation: int, place: Placement
) -> tuple[dict[str, bytes], bool]:
    """Return what each member gets, by member id, and whether another round is wanted."""
    subscriptions: dict[str, Subscription | UserDataError] = {}
    for key, each in said.items():
        try:
            subscriptions[key] = Subscription.decode(each)
        except UserDataError as error:
            subscriptions[key] = error
    assignment, is_another_round_wanted = assign(subscriptions, newest, generation, place)
    data = assignment.encode()
    size_bytes = group_metadata_size(said, data)
    if size_bytes > LARGE_GROUP_BYTES:
        _log.warning(
            "the tier is near to what its group can hold",
            bytes=size_bytes,
            machines=len(said),
            members=len(assignment.slot_map.members),
            fix="run fewer workers or machines, or raise message.max.bytes of the brokers",
        )
    return dict.fromkeys(said, data), is_another_round_wanted


def group_metadata_size(said: Mapping[str, bytes], assignment: bytes) -> int:
    """Return how much the coordinator has to keep of a group, without some bytes for names."""
    return sum(map(len, said.values())) + len(said) * len(assignment)


def assign(
    subscriptions: Subscriptions, previous: Assignment | None, generation: int, place: Placement
) -> tuple[Assignment, bool]:
    """Decide who owns which slot from now on; all members get the same.

    `previous` is the newest assignment that the leader has; `generation` is the group's, now. Also
    return whether the leader has to begin the next round itself: what is released begins one
    anyway.
    """
    # The outcome of the round before, if the leader knows it.
    last = None if previous is None or previous.generation != generation - 1 else previous
    admitted, refused = admit_members(subscriptions, previous)
    readable = [said for said in subscriptions.values() if isinstance(said, Subscription)]
    unheard = _unheard(readable, last, generation)
    claims: dict[int, tuple[Subscription, bool]] = {}
    for said in readable:
        is_member = admitted.get(said.name) is said or _was_admitted(said, previous)
        is_stale = said.generation != generation - 1
        may_have = last if is_member and is_stale else None
        for slot, is_releasing in _claimed(said, may_have).items():
            # Where two say that they have it, one of them errs: both are to release it.
            claims[slot] = said, is_releasing or slot in claims
    staying = _staying(admitted)
    slots = max((said.slots for said in admitted.values()), default=0)
    owners: list[str | None] = [None] * slots
    releasing = {slot: said.name for slot, (said, _) in claims.items() if slot < slots}
    targets: dict[int, str] = {}
    loads = _loads(admitted, previous, slots)
    wanted: Owners = ()
    if staying:
        wanted = place(_sticky(claims, previous, slots), sorted(staying), loads)
    for slot, name in enumerate(wanted):
        if slot not in claims:
            owners[slot] = None if unheard else name
        else:
            said, is_releasing = claims[slot]
            if said.name == name and said.process == admitted[name].process and not is_releasing:
                owners[slot] = name
                del releasing[slot]
        if owners[slot] is None and name is not None:
            targets[slot] = name
    assignment = Assignment(
        generation=generation,
        slot_map=SlotMap({name: said.addresses for name, said in admitted.items()}, owners),
        releasing=releasing,
        targets=targets,
        loads=loads,
        members={
            name: AnnouncedMember(
                said.admin_url, said.process, said.rules_digest, round(said.clock_s)
            )
            for name, said in admitted.items()
        },
        refused=refused,
        unheard=unheard,
    )
    return assignment, bool(unheard) and last is None


def admit_members(
    subscriptions: Subscriptions, previous: Assignment | None
) -> tuple[dict[str, Subscription], dict[str, RefusedMember]]:
    """Return who is admitted, by name, and who is refused, by member id in the group.

    Whoever was in the tier stays in it: of two with one name the later one is refused, and of two
    clusters the one that fewer slots are owned for. At least what the leader itself said is read.
    """
    refused: dict[str, RefusedMember] = {}
    readable: dict[str, Subscription] = {}
    for key, said in sorted(subscriptions.items()):
        if isinstance(said, UserDataError):
            refused[key] = RefusedMember("", f"its announcement is {said}")
        else:
            readable[key] = said

    def seniority(key: str) -> tuple[bool, int, int, str]:
        said = readable[key]
        return not _was_admitted(said, previous), -len(said.owned), -said.generation, key

    admitted: dict[str, Subscription] = {}
    kind, topic = _kind_of_tier(readable, previous), ""
    for key in sorted(readable, key=seniority):
        said = readable[key]
        if _kind(said) != kind:
            refused[key] = RefusedMember(said.name, _other_kind(_kind(said), kind))
        elif said.name in admitted:
            reason = f"another process has the machine name {said.name}: give each machine a name "
            reason += "of its own, or stop the other process"
            refused[key] = RefusedMember(said.name, reason)
        elif topic and said.state_topic not in ("", topic):
            reason = f"its state is in topic {said.state_topic}, and that of the tier in {topic}: "
            refused[key] = RefusedMember(said.name, f"{reason}correct state.topic")
        else:
            admitted[said.name] = said
            topic = topic or said.state_topic
    return dict(sorted(admitted.items())), refused


def _kind(said: Subscription) -> _Kind:
    return said.cluster_id, said.slots


def _kind_of_tier(readable: Mapping[str, Subscription], previous: Assignment | None) -> _Kind:
    def rank(kind: _Kind) -> tuple[int, int, int, _Kind]:
        alike = [said for said in readable.values() if _kind(said) == kind]
        owned = sum(len(said.owned) for said in alike)
        return -owned, -sum(_was_admitted(said, previous) for said in alike), -len(alike), kind

    return min(set(map(_kind, readable.values())), key=rank)


def _was_admitted(said: Subscription, previous: Assignment | None) -> bool:
    """Return whether this very process was in the tier in the round before."""
    known = None if previous is None else previous.members.get(said.name)
    return known is not None and known.process == said.process


def _other_kind(kind: _Kind, tiers: _Kind) -> str:
    cluster_id, slots = kind
    if cluster_id != tiers[0]:
        return (
            f"its clients reach cluster {cluster_id}, and those of the tier cluster {tiers[0]}: "
            "give this tier another tier.name, or correct cluster.bootstrap_servers"
        )
    return f"it has {slots} slots, and the tier has {tiers[1]}: run versions that go together"


def _staying(admitted: Mapping[str, Subscription]) -> list[str]:
    """Return the members that are to own slots.

    Not who is about to end, nor, where there are others, who has crashed again and again, nor who
    cannot be reached by clients: a newcomer counts as reached when a member of another machine has
    reached it, who has slots until most of those say that they could not. From its own machine a
    name may lead nowhere that leads clients to it.
    """
    present = {name: said for name, said in admitted.items() if not said.is_leaving}
    steady = {name: said for name, said in present.items() if not said.is_settling} or present
    reached: list[str] = []
    for name, said in steady.items():
        judges = [each for other, each in admitted.items() if machine_of(other) != machine_of(name)]
        is_reached = any(name in judge.reached for judge in judges)
        against = sum(name in judge.unreached for judge in judges)
        if is_reached or not judges or (said.owned and 2 * against <= len(judges)):
            reached.append(name)
    return reached or list(steady)


def _unheard(
    readable: list[Subscription], last: Assignment | None, generation: int
) -> frozenset[str]:
    """Return the processes that may have got slots of which neither they nor we can tell."""
    silent = frozenset(said.process for said in readable if said.generation != generation - 1)
    if last is not None:
        return last.unheard & silent
    # One member alone is the leader, and knows what it has.
    return silent if len(readable) > 1 else frozenset()


def _claimed(said: Subscription, may_have: Assignment | None) -> dict[int, bool]:
    """Return the slots that a member says it has, and those that `may_have` gave to it.

    With whether each is being released.
    """
    claimed = {slot: slot in said.releasing for slot in said.owned}
    if may_have is not None:
        claimed |= dict.fromkeys(may_have.slot_map.slots_of(said.name), False)
        claimed |= {slot: True for slot, name in may_have.releasing.items() if name == said.name}
    return claimed


def _sticky(claims: _Claims, previous: Assignment | None, slots: int) -> list[str | None]:
    """Return who has each slot, or else is to get it, or had it.

    So a member that was restarted gets its own again.
    """
    known: dict[int, str | None] = {}
    if previous is not None:
        known = {**dict(enumerate(previous.slot_map.owners)), **previous.targets}
    known |= {slot: said.name for slot, (said, is_releasing) in claims.items() if not is_releasing}
    return [known.get(slot) for slot in range(slots)]


def _loads(
    admitted: Mapping[str, Subscription], previous: Assignment | None, slots: int
) -> dict[int, SlotLoad]:
    """Return what each slot carries, as its owner says, or else as was known before.

    Who has just got a slot has not measured it yet; if it counted as nothing its owner would get
    more and more.
    """
    known = {} if previous is None else dict(previous.loads)
    for said in admitted.values():
        known |= said.loads
    return {slot: load for slot, load in known.items() if slot < slots}
