"""What happens to a driver, step by step: what it asks, is told and waits for."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from backpressure_parts import (
    INTERVAL_MS,
    VERSION,
    BackpressureWorld,
    answer,
    ask,
    rule,
    tell_earliest,
    told,
)

from proxy.backpressure.driver_view import REPORT_WAIT_MS
from proxy.progress.tracker import QueryReader

RATE = 100.0
PER_BATCH = 200
"""RATE in one interval."""
END = 1000
"""What a driver in mid-run has read."""

Ends = int | dict[int, int]
"""By partition; a number alone is of partition 0."""


class Run:
    """A world, and the connection of it that the steps are about."""

    def __init__(self, world: BackpressureWorld):
        self.world = world
        self.driver = None
        self.number = 0

    def connects(self) -> None:
        self.driver = self.world.lookups()

    def reconnects(self, pause_ms: float = 500) -> None:
        self.driver.closed()
        self.after(pause_ms)
        self.connects()

    def starts(self) -> None:
        """A new run of the query, and the first connection if there is none."""
        self.world.start()
        if self.driver is None:
            self.connects()

    def restarts(self, pause_ms: float = 5000) -> None:
        """A new run, on a connection of its own."""
        self.driver.closed()
        self.after(pause_ms)
        self.world.start()
        self.after(10)
        self.connects()

    def crashes(self, away_ms: float = 1000, pause_ms: float = 100) -> None:
        """The proxy, amid the run: its driver connects again a little after its return."""
        self.world.crash(away_ms)
        self.after(pause_ms)
        self.connects()

    def another(self, script: "Script") -> None:
        """Play a script on a second connection."""
        second = Run(self.world)
        second.connects()
        script.play(second)

    def looks(self, latest: Ends, expected: Ends | None = None, **how) -> dict[int, int]:
        """Ask for the latest offsets, and be told what is expected."""
        how = {"correlation_id": self.number, **how}
        seen = told(self.world, self.driver, by_partition(latest), **how)
        assert expected is None or seen == by_partition(expected)
        return seen

    def leaves_alone(self, latest: int, *timestamps: int) -> None:
        """The answer for these timestamps is passed on as it is."""
        frame = answer({0: latest})
        for each in timestamps:
            seen = self.driver.answered(ask([0], each), VERSION, frame, self.world.now_ms)
            assert seen is frame

    def earliest(self, offset: int, partition: int = 0) -> None:
        tell_earliest(self.world, self.driver, {partition: offset})

    def waits(self, expected_ms: float, asked=None) -> None:
        """An answer should still wait so long for a report."""
        asked = asked or ask([0], correlation_id=self.number)
        assert self.driver.wait_ms(asked, self.world.now_ms) == expected_ms

    def waits_for_heartbeat(self, most_ms: float) -> None:
        """It waits so long at most for a heartbeat, which comes, and then in vain for a report."""
        self.waits(most_ms)
        self.after(500)
        self.sends_heartbeat()
        self.waits(REPORT_WAIT_MS)
        self.after(REPORT_WAIT_MS)
        self.waits(0)

    def asks_as(self, number: int) -> None:
        """The client's next requests carry this correlation id."""
        self.number = number

    def sends_heartbeat(self, **how) -> None:
        """The listener says that the run lives."""
        self.world.send("running", **how)

    def waits_for_data(self, times: int = 2, unreported: int = 0) -> None:
        """The listener has looked so often, and seen it between two batches each time."""
        last = self.world.query.last_batch_id + unreported
        for _ in range(times):
            self.after(1)
            self.sends_heartbeat(is_waiting=True, last_batch_id=last)

    def reads(self, offset: int = END) -> None:
        """An executor asks for what follows an offset: a batch was planned."""
        QueryReader(self.world.query).fetch_asked("t", None, [(0, offset)], self.world.now_ms)

    def fetches(self) -> None:
        self.driver.is_executor = True

    def after(self, ms: float) -> None:
        self.world.pass_ms(ms)

    def sends(self, event: str, **how) -> None:
        self.world.send(event, **how)

    def batch(self, ends: Ends, **how) -> None:
        """A report, by default on a batch that was processed at RATE."""
        pace = {} if "ms" in how else {"rate": RATE}
        self.world.batch(by_partition(ends), **{**pace, **how})

    def next_batch(self, ends: Ends, **how) -> None:
        self.after(INTERVAL_MS)
        self.batch(ends, **how)

    def limit(self, rate: float | None) -> None:
        self.world.query_backpressure.set_ceiling(rate, "by hand", self.world.now_ms)

    def does(self, what: Callable[[BackpressureWorld], object]) -> None:
        what(self.world)

    def sees(self, what: Callable[[BackpressureWorld], object], expected: object) -> None:
        assert what(self.world) == expected


@dataclass(frozen=True)
class Script:
    """Calls of the methods of a run, to be made later."""

    settings: dict
    steps: tuple[Callable[[Run], object], ...] = ()

    def __getattr__(self, name: str):
        method = getattr(Run, name)
        return lambda *args, **how: replace(
            self, steps=(*self.steps, lambda run: method(run, *args, **how))
        )

    def play(self, run: Run | None = None) -> Run:
        run = run or Run(world_of(**self.settings))
        for step in self.steps:
            step(run)
        return run


def world_of(**settings) -> BackpressureWorld:
    return BackpressureWorld(rule(**{"min_rate": 1.0, "integral": 0.0, **settings}))


def fresh(**settings) -> Script:
    """Nothing is known yet, not even that there is a run."""
    return Script(settings)


def running(ends: Ends = END, **settings) -> Script:
    """A driver in mid-run: it was told `ends`, read them, and RATE is known."""
    begun = (
        fresh(**settings).does(BackpressureWorld.start).after(10).connects().looks(ends).after(100)
    )
    return begun.does(lambda world: world.rated(RATE, by_partition(ends))).after(10)


def by_partition(ends: Ends) -> dict[int, int]:
    return {0: ends} if isinstance(ends, int) else ends
