"""Declare the metrics about the members of a machine."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from .instruments import Declarations


class MemberInstruments(Declarations):
    """What a supervisor shows of the members; attributes are named like the metrics.

    They live in a registry of the supervisor's own, whose text comes before that of its workers.
    What a worker counts itself, as `visits_bytes_total`, is among its Instruments. A process
    without a supervisor has none of these.

    `member` is a member's name in the slot map, `worker` the number of a worker.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        plain = self._plain
        self.workers = plain(Gauge, "workers", "Workers of this machine that are alive.")
        self.worker_restarts_total = plain(
            Counter, "worker_restarts_total[worker]", "Workers started again after they had died."
        )
        self.workers_crash_looping = plain(
            Gauge, "workers_crash_looping", "Workers that die soon after each start."
        )
        self.member_up = plain(
            Gauge, "member_up[member]", "1 if the member of this machine answered this scrape."
        )
        self.slots_owned = plain(
            Gauge, "slots_owned[member]", "Slots that a member of this machine owns."
        )
        self.slot_moves_total = plain(
            Counter,
            "slot_moves_total",
            "Slots that came to a member of this machine from another member.",
        )
        self.slots_overloaded = plain(
            Gauge,
            "slots_overloaded",
            "Slots of this machine that fill a member alone, so that no move makes it less.",
        )
        self.members_silent = plain(
            Gauge,
            "members_silent",
            "Members, here and on other machines, that do not answer this one.",
        )
        self.tier_generation = plain(
            Gauge,
            "tier_generation[tier]",
            "Generation of the tier's group that this machine is in; 0 while it is in none.",
        )
