"""Declare the metrics about a member of a tier."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from .instruments import Declarations


class MemberInstruments(Declarations):
    """What a member of a tier shows of itself; attributes are named like the metrics.

    `worker` is the member's number among those of its host.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        plain = self._plain
        self.workers = plain(Gauge, "workers", "1: this member is alive; the sum is how many are.")
        self.worker_restarts_total = plain(
            Counter, "worker_restarts_total[worker]", "Workers started again after they had died."
        )
        self.workers_crash_looping = plain(
            Gauge, "workers_crash_looping", "1 if this member died soon after each start."
        )
        self.member_up = plain(
            Gauge, "member_up[member]", "1 if the member of this machine answered this scrape."
        )
        self.slots_owned = plain(Gauge, "slots_owned", "Slots that this member owns.")
        self.slot_moves_total = plain(
            Counter,
            "slot_moves_total",
            "Slots that came to this member from another one.",
        )
        self.slots_overloaded = plain(
            Gauge,
            "slots_overloaded",
            "Slots that fill this member alone, so that no move makes it less.",
        )
        self.members_silent = plain(
            Gauge,
            "members_silent",
            "Other members that do not answer this one.",
        )
        self.tier_generation = plain(
            Gauge,
            "tier_generation[tier]",
            "Generation of the tier's group that this member is in; 0 while it is in none.",
        )
