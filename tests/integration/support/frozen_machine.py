"""A machine of a tier as a process of its own; it prints how many slots it has, or `lost`."""

import asyncio
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # as a script it has no conftest.py

from parts.even_placement import even

from proxy.cluster.kafka_client import Bootstrap
from proxy.relay.steering import MemberAddresses
from proxy.tier.group.group_documents import Subscription
from proxy.tier.group.group_member import GroupMember
from proxy.tier.group.slot_states import SlotStates


def say(what: object) -> None:
    print(what, flush=True)  # noqa: T201


async def main(bootstrap: str, group: str, session_s: float) -> None:
    host, port = bootstrap.split(":")

    async def release(_slots: frozenset[int]) -> None:
        say("released")

    async def never(_generation: int) -> bool:
        return False

    slots = SlotStates()

    def assigned() -> None:
        assert slots.assignment is not None
        say(len(slots.assignment.slot_map.slots_of("frozen")))

    machine = GroupMember(
        Bootstrap([(host, int(port))]),
        group,
        slots,
        lambda: Subscription(
            MemberAddresses("frozen", {}), "http://x", "one", "rules", time.time()
        ),
        on_assigned=assigned,
        on_revoked=release,
        on_lost=lambda: say("lost"),
        may_hold=never,
        place=even,
        session_timeout_s=session_s,
    )
    await machine.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3])))
