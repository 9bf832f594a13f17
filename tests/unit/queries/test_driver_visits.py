"""How long drivers that came to the wrong member are sent on."""

from proxy.queries.following import FORGOTTEN_MS, SENT_ON_MS, RedirectedDrivers
from proxy.wire.list_offsets import EARLIEST, LATEST, LookupRequest

LOOKUP = LookupRequest(0, {("t", 0): LATEST, ("t", 1): EARLIEST}, 7)


def test_where_logs_begin_is_answered():
    assert not RedirectedDrivers().sends_on("c", LookupRequest(0, {("t", 0): EARLIEST}), 0.0)


def asks(visits, client_id, from_ms, until_ms, each_ms=FORGOTTEN_MS):
    """Return whether a driver that asks again and again is still sent on at the end."""
    at_ms = from_ms
    while at_ms < until_ms:
        visits.sends_on(client_id, LOOKUP, at_ms)
        at_ms += each_ms
    return visits.sends_on(client_id, LOOKUP, until_ms)


def test_a_driver_is_not_sent_on_for_ever():
    visits = RedirectedDrivers()
    assert asks(visits, "c", 0.0, SENT_ON_MS - 1)
    assert not visits.sends_on("c", LOOKUP, SENT_ON_MS)
    assert visits.sends_on("other", LOOKUP, SENT_ON_MS)
    again_ms = SENT_ON_MS + FORGOTTEN_MS + 1
    assert visits.sends_on("c", LOOKUP, again_ms)
    assert not asks(visits, "c", again_ms, again_ms + SENT_ON_MS)


def test_a_driver_that_was_answered_elsewhere_meanwhile_begins_anew():
    assert asks(RedirectedDrivers(), "c", 0.0, 10 * SENT_ON_MS, FORGOTTEN_MS + 1)
