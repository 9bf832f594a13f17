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
from dataclasses import dataclass, replace

from structlog import get_logger

from metrics.member_names import machine_of
from proxy.tier.slot_balance import Placement, SlotLoad
from proxy.tier.slot_map import SlotMap

from .admission import Subscriptions, admit, was_admitted
from .assignment import AnnouncedMember, Assignment
from .subscription import Subscription
from .user_data import FormError

LARGE_GROUP_BYTES = 512 * 2**10
"""The coordinator keeps what all members said and got in one record, of 1 MiB at most by default
(message.max.bytes)."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A slot that a member has, as far as is known."""

    name: str
    process: str
    is_let_go: bool


def lead(
    said: Mapping[str, bytes], newest: Assignment | None, generation: int, place: Placement
) -> tuple[dict[str, bytes], bool]:
    """Return what each member gets, by member id, and whether another round is wanted."""
    subscriptions = {key: _decoded(data) for key, data in said.items()}
    assignment, is_another_round_wanted = assign(subscriptions, newest, generation, place)
    data = assignment.encode()
    size_bytes = group_bytes(said, data)
    if size_bytes > LARGE_GROUP_BYTES:
        _log.warning(
            "the tier is near to what its group can hold",
            bytes=size_bytes,
            machines=len(said),
            members=len(assignment.slot_map.members),
            fix="run fewer workers or machines, or raise message.max.bytes of the brokers",
        )
    return dict.fromkeys(said, data), is_another_round_wanted


def group_bytes(said: Mapping[str, bytes], assignment: bytes) -> int:
    """Return how much the coordinator has to keep of a group, without some bytes for names."""
    return sum(map(len, said.values())) + len(said) * len(assignment)


def assign(
    subscriptions: Subscriptions,
    previous: Assignment | None,
    generation: int,
    place: Placement,
) -> tuple[Assignment, bool]:
    """Decide who owns which slot from now on; all members get the same.

    `previous` is the newest assignment that the leader has; `generation` is the group's, now. Also
    return whether the leader has to begin the next round itself: what is released begins one
    anyway.
    """
    is_informed = previous is not None and previous.generation == generation - 1
    admitted, refused = admit(subscriptions, previous)
    readable = [said for said in subscriptions.values() if isinstance(said, Subscription)]
    unheard = _unheard(readable, previous, generation, is_informed=is_informed)
    claims: dict[int, _Claim] = {}
    for said in readable:
        is_member = admitted.get(said.name) is said or was_admitted(said, previous)
        is_stale = said.generation != generation - 1
        may_have = previous if is_informed and is_member and is_stale else None
        for slot, claim in _claims(said, may_have).items():
            # Where two say that they have it, one of them errs: both are to let it go.
            claims[slot] = replace(claim, is_let_go=True) if slot in claims else claim
    staying = _staying(admitted)
    slots = max((said.slots for said in admitted.values()), default=0)
    owners: list[str | None] = [None] * slots
    releasing = {slot: claim.name for slot, claim in claims.items() if slot < slots}
    targets: dict[int, str] = {}
    loads = _loads(admitted, previous, slots)
    if staying:
        wanted = place(_sticky(claims, previous, slots), sorted(staying), loads)
        for slot, name in enumerate(wanted):
            has = claims.get(slot)
            if has is None:
                owners[slot] = None if unheard else name
            elif (
                has.name == name and has.process == admitted[has.name].process and not has.is_let_go
            ):
                owners[slot] = name
                del releasing[slot]
            if owners[slot] is None and name is not None:
                targets[slot] = name
    members = {name: said.addresses for name, said in admitted.items()}
    assignment = Assignment(
        generation=generation,
        slot_map=SlotMap(_map_generation(readable, previous, generation), members, owners),
        releasing=releasing,
        targets=targets,
        loads=loads,
        members={name: _announced(said) for name, said in admitted.items()},
        refused=refused,
        unheard=unheard,
    )
    return assignment, bool(unheard) and not is_informed


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
    readable: list[Subscription],
    previous: Assignment | None,
    generation: int,
    *,
    is_informed: bool,
) -> frozenset[str]:
    """Return the processes that may have got slots of which neither they nor we can tell."""
    silent = {said.process for said in readable if said.generation != generation - 1}
    if is_informed and previous is not None:
        return previous.unheard & silent
    # One member alone is the leader, and knows what it has.
    return frozenset(silent) if len(readable) > 1 else frozenset()


def _claims(said: Subscription, may_have: Assignment | None) -> dict[int, _Claim]:
    """Return the slots that a member says it has, and those that `may_have` gave to it."""
    name, process = said.name, said.process
    claims = {slot: _Claim(name, process, slot in said.letting_go) for slot in said.owned}
    if may_have is not None:
        for slot in may_have.slot_map.slots_of(name):
            claims[slot] = _Claim(name, process, False)
        for slot, member in may_have.releasing.items():
            if member == name:
                claims[slot] = _Claim(name, process, True)
    return claims


def _sticky(
    claims: Mapping[int, _Claim], previous: Assignment | None, slots: int
) -> list[str | None]:
    """Return who has each slot, or else is to get it, or had it.

    So a member that was restarted gets its own again.
    """
    before: dict[int, str | None] = {}
    if previous is not None:
        before = {**dict(enumerate(previous.slot_map.owners)), **previous.targets}
    return [
        claims[slot].name if slot in claims and not claims[slot].is_let_go else before.get(slot)
        for slot in range(slots)
    ]


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


def _map_generation(
    readable: list[Subscription], previous: Assignment | None, generation: int
) -> int:
    """Return a generation above all that any member has seen, even where Kafka began anew."""
    seen = [said.map_generation for said in readable]
    if previous is not None:
        seen.append(previous.slot_map.generation)
    return max(generation, 1 + max(seen, default=0))


def _announced(said: Subscription) -> AnnouncedMember:
    return AnnouncedMember(said.admin_url, said.process, said.rules_digest, round(said.clock_s))


def _decoded(data: bytes) -> Subscription | FormError:
    try:
        return Subscription.decode(data)
    except FormError as error:
        return error
