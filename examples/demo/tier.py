"""The demo of a tier: three members on one host, one of which is killed while clients read.

Each client has one owner, and is held to one bound whatever happens to that.
"""

import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError
from rich.console import Console

from examples.demo import CHECKOUT, trial
from examples.demo.canvas import BOUND_LINE, MAIN_COLOUR, OTHER_COLOUR, TEXT_COLOUR, picture
from examples.demo.children import Child
from examples.demo.frame import HOST, READY_LINE, Frame, Pace, Scenario, make_topics
from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports

FOLDER = CHECKOUT / "examples" / "three-on-one-host"
MEMBERS = ("a", "b", "c")
CLIENTS = ("reports", "orders", "audit", "search")
TOPIC = "tier-demo"
BOUND = 1024 * 1024
RECORD_BYTES, RECORDS = 8 * 1024, 4_000
MEMBER_TIMEOUT_S = 60.0
KILLED_AT_S, BACK_AT_S, END_S = 15, 30, 50
BRIEF_S = (8, 16, 26)
WINDOW_S = 10
MOST_OF_BOUND = 1.25
"""In any ten seconds, and the burst that a quiet client has."""
BACK_WITHIN_S = 15
COLOURS = (MAIN_COLOUR, OTHER_COLOUR, "#5b8c5a", TEXT_COLOUR)


@dataclass(slots=True)
class Reader:
    """A client that reads the topic over and over; `taken` are the bytes that it has got."""

    client_id: str
    bootstrap: Sequence[str]
    stop: threading.Event
    taken: int = 0

    def run(self) -> None:
        """Read until it is to stop, whatever happens to a member."""
        consumer = KafkaConsumer(
            bootstrap_servers=list(self.bootstrap),
            client_id=self.client_id,
            group_id=None,
            check_crcs=False,  # in pure Python that takes longer than all the rest
        )
        partition = TopicPartition(TOPIC, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        while not self.stop.is_set():
            with suppress(KafkaError):
                for records in consumer.poll(timeout_ms=500).values():
                    self.taken += sum(len(record.value) for record in records)
                    if records[-1].offset == RECORDS - 1:
                        consumer.seek(partition, 0)
        consumer.close()


@dataclass(slots=True)
class Seen:
    """What there was at each look, which are a second apart where the machine does not stand still.

    `lengths_s` is the time from the look before, in which each client has `taken` so many bytes.
    """

    killed: str = ""
    killed_s: int = 0
    back_s: int = 0
    lengths_s: list[float] = field(default_factory=list)
    taken: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in CLIENTS})
    owned: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in MEMBERS})


def measure(frame: Frame, _megabytes: int | None, brief: bool) -> Seen:
    """Run broker, members and clients; kill a member, and start it again."""
    screen, seen = frame.screen, Seen()
    seen.killed_s, seen.back_s, end_s = BRIEF_S if brief else (KILLED_AT_S, BACK_AT_S, END_S)
    ports = free_ports(2 * len(MEMBERS))
    bootstrap = [f"{HOST}:{port}" for port in ports[: len(MEMBERS)]]
    admin = dict(zip(MEMBERS, ports[len(MEMBERS) :], strict=True))
    screen.step("Kafka broker starts")
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker(frame.work_dir / "broker"))
        make_topics(broker.bootstrap, [TOPIC], 1)
        _fill(broker.bootstrap)
        screen.step(f"Three members of one tier start, as in {FOLDER}")
        members = {
            name: stack.enter_context(
                _member(frame, name, broker.bootstrap, bootstrap[place], admin[name])
            )
            for place, name in enumerate(MEMBERS)
        }
        for member in members.values():
            _await_ready(member)
        stop = threading.Event()
        stack.callback(stop.set)
        readers = [Reader(name, bootstrap, stop) for name in CLIENTS]
        for reader in readers:
            threading.Thread(target=reader.run, daemon=True).start()
        screen.step(f"Four clients read, each held to {BOUND // 1024} KiB/s")
        pace, before, before_s = Pace(), [0] * len(readers), time.monotonic()
        for second in range(end_s):
            pace.wait()
            now_s = time.monotonic()
            seen.lengths_s.append(now_s - before_s)
            before_s = now_s
            if second == seen.killed_s:
                seen.killed = max(MEMBERS, key=lambda name: seen.owned[name][-1])
                screen.step(f"Member {seen.killed} is killed")
                members[seen.killed].kill()
            if second == seen.back_s:
                screen.step(f"Member {seen.killed} starts again")
                place = MEMBERS.index(seen.killed)
                stack.enter_context(
                    _member(
                        frame,
                        seen.killed,
                        broker.bootstrap,
                        bootstrap[place],
                        admin[seen.killed],
                    )
                )
            for position, reader in enumerate(readers):
                taken = reader.taken
                seen.taken[reader.client_id].append(taken - before[position])
                before[position] = taken
            owned = _owned(admin.values())
            for name in MEMBERS:
                seen.owned[name].append(owned.get(name, 0))
    return seen


def conclude(console: Console, seen: Seen) -> int:
    """Compare what was seen with what a tier promises."""
    starts = range(WINDOW_S, len(seen.lengths_s) - WINDOW_S + 1)
    windows = [slice(start, start + WINDOW_S) for start in starts]
    most = max(
        sum(taken[window]) / sum(seen.lengths_s[window]) / BOUND
        for taken in seen.taken.values()
        for window in windows
    )
    silent = max(_longest_silence_s(taken, seen.lengths_s) for taken in seen.taken.values())
    shared = min(seen.owned[name][-1] for name in MEMBERS)
    return trial.summarise(
        console,
        [
            trial.Claim(
                f"no client has more than {MOST_OF_BOUND:g} times its bound in {WINDOW_S} s",
                f"{most:.2f} times at most",
                most <= MOST_OF_BOUND,
            ),
            trial.Claim(
                f"all read again within {BACK_WITHIN_S} s of the kill",
                f"{silent:.0f} s without a record at most",
                silent <= BACK_WITHIN_S,
            ),
            trial.Claim("who came back owns slots again", f"{shared} at least", shared > 0),
        ],
    )


def draw(seen: Seen, path: Path) -> None:
    """Draw the clients' rates, and whose the slots are, by the second."""
    title = f"Three members, one killed: clients keep their bounds, and {seen.killed} comes back"
    with picture(path, title, (3, 2)) as panels:
        rates, owned = panels
        for axes in panels:
            axes.axvspan(seen.killed_s, seen.back_s, color="#f3ead9", zorder=0)
        for colour, (name, each) in zip(COLOURS, seen.taken.items(), strict=True):
            drawn = [size / s / BOUND for size, s in zip(each, seen.lengths_s, strict=True)]
            rates.plot(drawn, color=colour, label=name, linewidth=1.6)
        rates.axhline(1.0, **BOUND_LINE)
        rates.set_ylabel("rate in bounds")
        rates.legend(loc="upper right", ncols=len(CLIENTS), frameon=False)
        for colour, name in zip(COLOURS, MEMBERS, strict=False):
            owned.plot(seen.owned[name], color=colour, label=f"member {name}", linewidth=1.6)
        owned.set_ylabel("slots owned")
        owned.set_xlabel("seconds")
        owned.legend(loc="upper right", ncols=len(MEMBERS), frameon=False)


def _member(frame: Frame, name: str, broker: str, bootstrap: str, admin_port: int) -> Child:
    """Start a member with its example, on free ports and in front of the demo's broker."""
    text = (FOLDER / f"member-{name}.yaml").read_text(encoding="utf-8")
    text = re.sub(r"bootstrap_servers: .*", f"bootstrap_servers: [{broker}]", text)
    text = re.sub(r'bind: "127\.0\.0\.1:\d+", advertised', f'bind: "{bootstrap}", advertised', text)
    text = re.sub(r"broker_ports: [\d-]+", "broker_ports: 0", text)
    text = re.sub(r'admin: \{bind: ".*"\}', f'admin: {{bind: "{HOST}:{admin_port}"}}', text)
    config = frame.out_dir / f"member-{name}.yaml"
    config.write_text(text, encoding="utf-8")
    return Child(f"member-{name}", "proxy", ["run", "--config", str(config)], frame.out_dir)


def _await_ready(member: Child) -> None:
    member.wait_for(lambda: READY_LINE in member.lines() or None, "joined", MEMBER_TIMEOUT_S)


def _fill(bootstrap: str) -> None:
    producer = KafkaProducer(bootstrap_servers=bootstrap)
    for _ in range(RECORDS):
        producer.send(TOPIC, bytes(RECORD_BYTES), partition=0)
    producer.close()


def _owned(ports: Iterable[int]) -> dict[str, int]:
    """Return how many slots each machine owns, as the first one says that answers."""
    for port in ports:
        with suppress(OSError, ValueError):
            url = f"http://{HOST}:{port}/v1/tier"
            with urllib.request.urlopen(url, timeout=1) as answer:
                members = json.load(answer)["members"]
            return {each["machine"]: each["owned"] for each in members}
    return {}


def _longest_silence_s(taken: Sequence[int], lengths_s: Sequence[float]) -> float:
    """Return for how long there was nothing, after the first record."""
    heard = itertools.dropwhile(lambda look: not look[0], zip(taken, lengths_s, strict=True))
    looks = itertools.groupby(heard, lambda look: look[0] > 0)
    return max((sum(s for _, s in each) for is_some, each in looks if not is_some), default=0.0)


SCENARIO = Scenario(Path("build/demo-tier"), "tier.png", measure, draw, conclude)
