"""How long drivers that came to the wrong member are sent on."""

from proxy.queries.following import FORGOTTEN_MS, SENT_ON_MS, DriverVisits
from proxy.wire.list_offsets import EARLIEST, LATEST, OffsetLookup

LOOKUP = OffsetLookup(0, {("t", 0): LATEST, ("t", 1): EARLIEST}, 7)


def test_where_logs_begin_is_answered():
    assert not DriverVisits().sends_on("c", OffsetLookup(0, {("t", 0): EARLIEST}), 0.0)


def test_a_driver_is_not_sent_on_for_ever():
    visits = DriverVisits()
    assert visits.sends_on("c", LOOKUP, 0.0)
    assert visits.sends_on("c", LOOKUP, SENT_ON_MS - 1)
    assert not visits.sends_on("c", LOOKUP, SENT_ON_MS)
    assert visits.sends_on("other", LOOKUP, SENT_ON_MS)
    again_ms = SENT_ON_MS + FORGOTTEN_MS + 1
    assert visits.sends_on("c", LOOKUP, again_ms)
    assert not visits.sends_on("c", LOOKUP, again_ms + SENT_ON_MS)
    visits.forget()
    assert visits.sends_on("c", LOOKUP, again_ms + SENT_ON_MS)
