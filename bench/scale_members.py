"""Figure: what a change of the members costs, with up to 1,000 of them and 100,000 quota keys.

A simulation: the rules by which slots are shared out, with a clock of its own, and no process or
broker. A member joins, one leaves, and the load shifts from some keys to others. What goes through
Kafka follows from the sizes of the documents as they would be sent.
"""

import json
import random
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from bench.report import Row, Verdict
from proxy.tier.group.group_member import HEARTBEAT_INTERVAL_S
from proxy.tier.slot_balance import (
    LEAST_LOAD,
    MOST_LOAD,
    SlotLoad,
    overloaded_slots,
    placed_slots,
)
from proxy.tier.slot_map import ListenerPorts, MemberAddresses, SlotMap, slot_of

FIGURE = "scale-members"
SLOTS = 4096
FULL_KEYS, QUICK_KEYS = 100_000, 10_000
FULL_MEMBERS, QUICK_MEMBERS = (2, 10, 100, 1000), (2, 10)
WORKERS_PER_MACHINE = 4
MEAN_LOAD = 0.4
# Keys' loads have a long tail: few of them are many times the mean.
TAIL, MOST_OF_MEAN = 1.5, 200.0
# In a load shift the keys of so many of the members come down to so much of what they did.
QUIET_MEMBERS, QUIET_LOAD = 0.3, 0.1
# Of the group protocol, request and response with their headers.
HEARTBEAT_BYTES = 150
FIRST_PORT, PORTS = 20_000, 100
SEED = 1
KILO = 1000.0

Owners = list[str | None]
Loads = Mapping[int, SlotLoad]


def measure(quick: bool) -> list[Row]:
    """Simulate each number of members and give its rows."""
    keys = QUICK_KEYS if quick else FULL_KEYS
    slots = [slot_of(f"client-id=app-{number}", SLOTS) for number in range(keys)]
    return [
        row
        for members in (QUICK_MEMBERS if quick else FULL_MEMBERS)
        for row in _rows(slots, members)
    ]


def _rows(slots: Sequence[int], members: int) -> Iterator[Row]:
    names = [_name(at) for at in range(members)]
    owners, _ = _settle([None] * SLOTS, names, {})
    title = f"{members:,} members"
    yield _leave(title, owners, names)
    yield _join(title, owners, names)
    yield _shift(title, owners, names, slots)
    yield _traffic(title, owners, names)


def _name(at: int) -> str:
    return f"proxy-{at // WORKERS_PER_MACHINE}/{at % WORKERS_PER_MACHINE}"


def _settle(owners: Owners, names: Sequence[str], loads: Loads) -> tuple[Owners, list[int]]:
    """Place the slots until nothing changes; return how many moved in each round."""
    moved: list[int] = []
    while True:
        after: Owners = [*placed_slots(owners, names, loads)]
        changes = sum(one != other for one, other in zip(owners, after, strict=True))
        if not changes:
            return owners, moved
        owners = after
        moved.append(changes)


def _leave(title: str, owners: Owners, names: Sequence[str]) -> Row:
    own = owners.count(names[0])
    _, moved = _settle(owners, names[1:], {})
    return Row(
        FIGURE,
        f"{title}, one leaves",
        f"its {own:,} slots move, and as many others at most",
        f"{sum(moved):,} of {SLOTS:,} slots, {len(moved)} rounds",
        Verdict.of(own <= sum(moved) <= 2 * own),
        {"slots_moved": moved},
    )


def _join(title: str, owners: Owners, names: Sequence[str]) -> Row:
    new = _name(len(names))
    fair = SLOTS / (len(names) + 1)
    after, moved = _settle(owners, [*names, new], {})
    counts = Counter(after)
    return Row(
        FIGURE,
        f"{title}, one joins",
        f"it gets {LEAST_LOAD * fair:,.0f} slots at least, and no others move",
        f"{sum(moved):,} of {SLOTS:,} slots, {len(moved)} rounds; it has {counts[new]:,}",
        Verdict.of(sum(moved) == counts[new] >= LEAST_LOAD * fair),
        {"slots_moved": moved},
    )


def _loads(slots: Sequence[int], members: int, quiet: Collection[int] = ()) -> Loads:
    """Return the load of each slot: all together, the members are at `MEAN_LOAD`."""
    rng = random.Random(SEED)
    found = dict.fromkeys(range(SLOTS), 0.0)
    for slot in slots:
        weight = min(rng.paretovariate(TAIL), MOST_OF_MEAN)
        found[slot] += weight * (QUIET_LOAD if slot in quiet else 1.0)
    scale = MEAN_LOAD * members / sum(found.values())
    return {slot: SlotLoad(0.0, weight * scale) for slot, weight in found.items()}


def _shift(title: str, owners: Owners, names: Sequence[str], slots: Sequence[int]) -> Row:
    """Let the load go from the slots of some members, after it was evened out once."""
    balanced, _, _ = _balance(owners, names, _loads(slots, len(names)))
    quiet_names = set(names[: max(1, int(len(names) * QUIET_MEMBERS))])
    quiet = {slot for slot, owner in enumerate(balanced) if owner in quiet_names}
    loads = _loads(slots, len(names), quiet)
    _, moves, imbalance = _balance(balanced, names, loads)
    heaviest = max(load.share for load in loads.values()) / MEAN_LOAD
    limit = max(MOST_LOAD, MOST_LOAD * heaviest)
    active = [at + 1 for at, count in enumerate(moves) if count]
    rounds = max(active, default=0)
    return Row(
        FIGURE,
        f"{title}, load leaves {len(quiet_names):,} of them",
        f"most of mean at most {limit:.2f}",
        f"most of mean {imbalance[0]:.2f} -> {imbalance[-1]:.2f}, {sum(moves):,} slots in {rounds} "
        f"rounds; {len(overloaded_slots(loads, names))} slots fill a member",
        Verdict.of(imbalance[-1] <= limit),
        {"slots_moved": moves, "imbalance": imbalance, "members": len(names)},
    )


def _balance(
    owners: Owners, names: Sequence[str], loads: Loads
) -> tuple[Owners, list[int], list[float]]:
    """Even load out, until nothing moves."""
    moves: list[int] = []
    imbalance = [_imbalance(owners, names, loads)]
    while not moves or moves[-1]:
        after: Owners = [*placed_slots(owners, names, loads)]
        moves.append(sum(one != other for one, other in zip(owners, after, strict=True)))
        owners = after
        imbalance.append(_imbalance(owners, names, loads))
    return owners, moves, imbalance


def _imbalance(owners: Owners, names: Sequence[str], loads: Loads) -> float:
    """Return the most that a member has, in times of the average."""
    totals = dict.fromkeys(names, 0.0)
    for slot, owner in enumerate(owners):
        assert owner is not None
        totals[owner] += loads[slot].share
    return max(totals.values()) * len(names) / sum(totals.values())


def _traffic(title: str, owners: Owners, names: Sequence[str]) -> Row:
    """Say what goes through Kafka: each machine gets the whole map with its assignment."""
    machines = -(-len(names) // WORKERS_PER_MACHINE)
    ports = ListenerPorts("proxy.example.com", FIRST_PORT, FIRST_PORT + 1, FIRST_PORT + PORTS)
    members = {name: MemberAddresses(name, {"clients": ports}) for name in names}
    # After years of moves the owners are in no order that a compression could find.
    mixed = random.Random(SEED).sample(owners, len(owners))
    document = SlotMap(1, members, mixed).document()
    plain = json.dumps(document, separators=(",", ":")).encode()
    packed = len(zlib.compress(plain))
    loads = {str(slot): [12_345_678, 0.123] for slot in range(-(-SLOTS // machines))}
    tells = len(json.dumps({"loads": loads, "members": document["members"][:WORKERS_PER_MACHINE]}))
    # JoinGroup and SyncGroup of each; the leader sends all maps and is told all subscriptions.
    messages = 4 * machines
    moved_bytes = machines * (2 * packed + 2 * tells)
    beats = machines / HEARTBEAT_INTERVAL_S
    return Row(
        FIGURE,
        f"{title} on {machines} machines, through Kafka",
        "",
        f"map {len(plain) / KILO:.1f} kB, {packed / KILO:.1f} kB compressed; a rebalance "
        f"{messages:,} messages, {moved_bytes / KILO:,.0f} kB; heartbeats "
        f"{2 * beats:.0f} messages/s, {beats * HEARTBEAT_BYTES / KILO:.1f} kB/s",
        Verdict.INFO,
        {
            "machines": machines,
            "map_bytes": len(plain),
            "compressed_map_bytes": packed,
            "rebalance_bytes": moved_bytes,
            "plain_rebalance_bytes": machines * (2 * len(plain) + 2 * tells),
            "rebalance_messages": messages,
            "heartbeats_per_s": beats,
        },
    )
