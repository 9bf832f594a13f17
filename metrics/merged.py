"""Merge what the members of a machine show to Prometheus into what one process would show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from .combined_values import combine
from .family_text import FamilyText, read_families
from .kept_counters import KeptCounters
from .merge_rules import gauge_rule

HISTOGRAM: Final = "histogram"
COUNTED: Final = ("counter", HISTOGRAM)
"""Types that are added, and must not go back."""


@dataclass(frozen=True, slots=True)
class MemberScrape:
    """What one member answered."""

    run: int
    """Another one for each start of the member."""
    families: Mapping[str, FamilyText]

    @classmethod
    def read(cls, text: bytes, run: int) -> Self:
        """Take the text of `/metrics` apart. Raises ValueError when it is none of ours."""
        return cls(run, read_families(text))


class MergedMetrics:
    """Adds up counters and histograms; of gauges, `merge_rules` says what is shown.

    No counter goes back while it is shown: a member that restarts begins at 0, but what it had
    counted is kept. `max_label_sets` is that of the members' own metrics: about so many sets of
    labels are kept of each metric for those that no member shows any more (see KeptCounters).

    10,000 clients at each of 4 members take a third of a second of CPU: use a thread. One call at a
    time, with answers that were asked for after the last call: older ones would go back.
    Raises ValueError when `max_label_sets` is below 1.
    """

    def __init__(self, *, max_label_sets: int) -> None:
        if max_label_sets < 1:
            raise ValueError(f"max_label_sets must be 1 or more, got {max_label_sets!r}")
        self._max_label_sets = max_label_sets
        self._runs: dict[str, int] = {}
        self._counters: dict[str, KeptCounters] = {}
        self._heads: dict[str, FamilyText] = {}
        """Of the counters: they are shown also while no member answers."""

    def merge(self, scrapes: Mapping[str, MemberScrape | None]) -> bytes:
        """Return the text for Prometheus.

        `scrapes` names all members; None is for one that does not answer this time: its counters
        stay at their last values, its gauges are left out. One that is not named has gone for good.
        """
        answers = {member: each for member, each in scrapes.items() if each is not None}
        ended = [
            member
            for member, run in self._runs.items()
            if member not in scrapes or (member in answers and answers[member].run != run)
        ]
        self._runs = {member: run for member, run in self._runs.items() if member in scrapes}
        self._runs.update((member, each.run) for member, each in answers.items())
        heads: dict[str, FamilyText] = {}
        for each in answers.values():
            for name, family in each.families.items():
                heads.setdefault(name, family)
        for name, family in self._heads.items():
            heads.setdefault(name, family)
        return b"".join(
            self._counted(name, family, answers, ended)
            if family.type in COUNTED
            else _gauge(name, family, answers)
            for name, family in heads.items()
        )

    def __len__(self) -> int:
        """Return how many values are kept."""
        return sum(map(len, self._counters.values()))

    def _counted(
        self,
        name: str,
        family: FamilyText,
        answers: Mapping[str, MemberScrape],
        ended: list[str],
    ) -> bytes:
        kept = self._counters.get(name)
        if kept is None:
            is_histogram = family.type == HISTOGRAM
            kept = KeptCounters(is_histogram=is_histogram, max_label_sets=self._max_label_sets)
            self._counters[name] = kept
            self._heads[name] = FamilyText(family.head, family.type, {})
        found = {
            member: each.families[name].values if name in each.families else {}
            for member, each in answers.items()
        }
        kept.take(found, ended)
        return family.written(kept.values())


def _gauge(name: str, family: FamilyText, answers: Mapping[str, MemberScrape]) -> bytes:
    members = [each.families[name].values for each in answers.values() if name in each.families]
    return family.written(combine(members, gauge_rule(name)))
