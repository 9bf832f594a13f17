"""Look-ups on a connection: whose it is, and the report that an answer waits for.

The report on the batch before may come a little later than the driver asks.
"""

import pytest
from backpressure_parts import INTERVAL_MS, BackpressureWorld, ask
from driver_script import END, PER_BATCH, RATE, fresh, running

from proxy.backpressure.driver_view import LIFE_WAIT_MS, REPORT_WAIT_MS
from proxy.progress.report import TriggerKind
from proxy.wire.list_offsets import EARLIEST


def once(world: BackpressureWorld) -> None:
    world.query.trigger_kind = TriggerKind.AVAILABLE_NOW


RECONNECTED = running().reconnects()
ASKS_AGAIN = running().looks(5000).reads().after(INTERVAL_MS)
WAITING = ASKS_AGAIN.waits(REPORT_WAIT_MS)

SCRIPTS = {
    # AvailableNow, started while a killed run is still on the books, takes its end from it.
    "a connection newer than the latest report is told the truth": RECONNECTED.looks(
        5000, 5000
    ).sees(
        lambda world: world.document["clamp"]["why"],
        "the connection is newer than the latest report",
    ),
    "it is trusted after the next report": RECONNECTED.looks(1100)
    .after(500)
    .batch(1100)
    .looks(5000, 1100 + PER_BATCH),
    "a report that was made before the connection does not make it trusted": RECONNECTED.after(500)
    .batch(END, age_ms=600)
    .looks(5000, 5000),
    "a connection to another broker is trusted beside one that is": running()
    .after(500)
    .another(fresh().looks(5000, END + PER_BATCH)),
    "an executor's connection makes nobody trusted": running()
    .fetches()
    .after(500)
    .another(fresh().looks(5000, 5000)),
    # It looks where its log starts and ends, time and again; all that it reads it has read before.
    "an executor that connects again is known before it fetches": running()
    .looks(5000, END + PER_BATCH)
    .another(fresh().earliest(0).looks(5000, 5000).earliest(0).looks(5000, 5000))
    .next_batch(END + PER_BATCH)
    .looks(5000, END + 2 * PER_BATCH),
    "who asks where a log starts that was not read yet may be the driver": running()
    .earliest(0, partition=1)
    .looks(5000, END + PER_BATCH),
    "what an untrusted driver was told counts as told": RECONNECTED.looks(3000)
    .starts()
    .looks(3500)
    .after(500)
    .batch(1200)
    .next_batch(1300)
    .looks(9000, 3500),
    # An outage of the broker ends all connections, and the driver's next one is new.
    "one whose requests go on is trusted at once": running()
    .asks_as(39)
    .looks(1100)
    .reads()
    .after(500)
    .batch(1100)
    .reconnects(60)
    .asks_as(45)
    .waits(0)
    .looks(5000, 1100 + PER_BATCH),
    "one that counts anew is trusted with the next heartbeat": running()
    .asks_as(39)
    .looks(1100)
    .sends_heartbeat()
    .reconnects()
    .asks_as(3)
    .waits(LIFE_WAIT_MS)
    .after(1500)
    .sends_heartbeat()
    .after(1)
    .looks(5000, END + PER_BATCH),
    "if none comes, the truth": running()
    .sends_heartbeat()
    .reconnects()
    .waits(LIFE_WAIT_MS)
    .after(LIFE_WAIT_MS)
    .waits(0)
    .looks(5000, 5000),
    "heartbeats that ended long ago are not waited for": running()
    .sends_heartbeat()
    .reconnects(LIFE_WAIT_MS)
    .waits(0)
    .looks(5000, 5000),
    "as long as heartbeats come the bound stays, whatever a batch takes": running(hold_ms=10_000.0)
    .looks(5000)
    .reads()
    .after(8_000)
    .sends_heartbeat()
    .after(8_000)
    .sends_heartbeat()
    .after(8_000)
    .waits(REPORT_WAIT_MS)
    .after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, END + 2 * PER_BATCH),
    # Waits
    "an answer waits for the report on the batch before": running()
    .waits(0)
    .looks(5000)
    .after(INTERVAL_MS)
    .waits(REPORT_WAIT_MS)
    .after(100)
    .waits(REPORT_WAIT_MS - 100)
    .batch(1200, age_ms=100)
    .waits(0)
    .looks(5000, 1200 + PER_BATCH),
    # The driver would not ask if its batch were not done.
    "it waits no longer than that and takes the batch for done": WAITING.after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, END + 2 * PER_BATCH)
    .reads(END + PER_BATCH)
    .after(100)
    # Only now Spark tells of it.
    .batch(END + PER_BATCH)
    .after(INTERVAL_MS)
    .waits(REPORT_WAIT_MS)
    .batch(END + 2 * PER_BATCH)
    .waits(0)
    .looks(5000, END + 3 * PER_BATCH),
    "what it was not told last is not taken for done": WAITING.after(REPORT_WAIT_MS)
    .waits(0)
    .batch(1100)
    .looks(5000, 1100 + PER_BATCH),
    # A run that lives gets on although none of its reports comes.
    "one wait in vain is enough until a report comes": WAITING.after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, 1400)
    .reads(1200)
    .after(INTERVAL_MS)
    .waits(0)
    .looks(5000, 1600)
    .reads(1400)
    .after(INTERVAL_MS)
    .waits(0)
    .batch(1600)
    .looks(5000)
    .after(INTERVAL_MS)
    .waits(REPORT_WAIT_MS),
    "it waits for the start of a run whose first batch is bounded": fresh(initial_rate=RATE)
    .connects()
    .earliest(0)
    .waits(REPORT_WAIT_MS)
    .after(100)
    .starts()
    .waits(0)
    .looks(5000, PER_BATCH),
    "also after the run before has ended": running(initial_rate=RATE)
    .sends("terminated")
    .reconnects()
    .waits(REPORT_WAIT_MS)
    .after(REPORT_WAIT_MS)
    .waits(0)
    .looks(5000, 5000),
    "also where no rate is known: it starts slowly": fresh().connects().waits(REPORT_WAIT_MS),
    "but not where the runs read to the end, once": running()
    .does(once)
    .sends("terminated")
    .reconnects()
    .waits(0),
    "it does not wait when something else is asked for": ASKS_AGAIN.waits(0, ask([0], EARLIEST))
    .waits(0, ask([1]))
    .waits(0, ask([])),
    # A second source of the query asks for the same partitions in the same trigger.
    "it does not wait on a connection that told nothing new": running()
    .looks(5000)
    .after(1)
    .another(fresh().waits(0)),
    # With maxOffsetsPerTrigger the driver plans less than it may: the report is there.
    "it does not wait when the batch took less than it was told": running()
    .looks(5000)
    .next_batch(1050)
    .after(10)
    .waits(0),
    "it does not wait when the batch was done in no time": running()
    .looks(5000)
    .after(20)
    .batch(1200, ms=10)
    .waits(0),
    "a late report on an earlier batch is not the one it waits for": running()
    .looks(1100)
    .after(INTERVAL_MS)
    # The report on 1000..1100 was too late for this answer ...
    .looks(1150, 1150)
    .after(20)
    .batch(1100, age_ms=22)
    # ... and is about the batch before the one that is being read now.
    .after(1000)
    .waits(REPORT_WAIT_MS),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_whom_it_trusts_and_what_it_waits_for(script):
    script.play()


def test_it_waits_also_when_a_batch_took_longer_than_reports_may_be_silent():
    begun = running(hold_ms=10_000.0).looks(5000).after(60_000).waits(REPORT_WAIT_MS).after(20)
    run = begun.batch(1200, ms=59_000, age_ms=20).waits(0).play()
    assert run.looks(5000)[0] < 5000


def test_a_wait_is_time_that_the_proxy_held_the_query():
    begun = WAITING.after(250)
    told = begun.batch(1200, ms=1000, age_ms=250).looks(5000).after(750)
    run = told.batch(1400, ms=1000).play()
    assert "held 250 ms left out" in run.world.document["reason"]
