"""Figure: what holds cost consumer groups, against Kafka's own quota in the same run.

Every client is held to 250 kB/s in three ways at once: by Kafka's own quota, by the proxy in mode
delay and by the proxy in mode mute. A Sarama group (one connection per broker, so a heartbeat goes
out behind a held Fetch) reads a topic; a record that comes twice says that a member lost its
partitions. franz-go's own test of groups runs the same ways. See `group_ways`, `group_reader` and
`group_suite`.
"""

from bench import group_reader, group_suite
from bench.golang import find_go
from bench.group_ways import Brokers
from bench.lab import open_lab
from bench.report import Row, Verdict

FIGURE = "groups"


def measure(quick: bool) -> list[Row]:
    """Run the group and the test suite on all ways and give their rows."""
    go = find_go()
    if go is None:
        missing = "go not installed"
        return [
            Row(FIGURE, what, target, missing, Verdict.NOT_MEASURED)
            for what, target in (
                (group_reader.WHAT, group_reader.TARGET),
                (group_suite.WHAT, group_suite.TARGET),
            )
        ]
    with open_lab() as lab:
        brokers = Brokers.start(lab)
        return [
            *group_reader.measure(lab, go, brokers, quick),
            *group_suite.measure(lab, go, brokers, quick),
        ]
