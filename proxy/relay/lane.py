"""The lane: a compiled loop for what is plain, where it was compiled.

It takes all whole frames that a read brought, as long as each begins like an earlier request, or
answers one, and as long as quotas lend enough for it. It sends them on with one call. All else is
the flows' own. Without a compiler there is none, and the flows do everything.
"""

try:
    from proxy.relay._lane import Kind, Lane
except ImportError:  # it was not compiled
    Kind = Lane = None  # type: ignore[assignment, misc]

__all__ = ["Kind", "Lane"]

MAX_LANE_KINDS = 16
"""Of a connection, before the oldest goes."""

MAX_SAME_API = 2
"""Of an API and version: a train of Produce requests has two values of acks by turns."""

METER_REQUESTS, METER_RESPONSES = 1, 2
"""Which bytes of a kind are taken from its lease; 0: none."""

ANY_RESPONSE, KNOWN_RESPONSE, NO_RESPONSE, WHOLE_RESPONSE = range(4)
"""Which responses to a kind are plain; see `Kind`."""


def add_plain_kind(kinds: list[Kind], latest: Kind) -> None:
    """Add a kind that may pass in place of one that begins alike, or of the oldest of many."""
    about = latest.about
    same = about.api_key, about.version
    alike = [each for each in kinds if (each.about.api_key, each.about.version) == same]
    gone = [each for each in alike if each.about.plain_start == about.plain_start]
    for each in gone or alike[MAX_SAME_API - 1 :] or kinds[MAX_LANE_KINDS - 1 :]:
        kinds.remove(each)
    kinds.insert(0, latest)
