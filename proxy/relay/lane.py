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

METER_REQUESTS, METER_RESPONSES = 1, 2
"""Which bytes of a kind are taken from its lease; 0: none."""

ANY_RESPONSE, KNOWN_RESPONSE, NO_RESPONSE = range(3)
"""Which responses to a kind are plain; see `Kind`."""
