"""The parts of the status page: how a test serves it, finds a row in it, and opens all of it."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pipeline_world
import spark_world
from admin_world import HOSTILE, AdminWorld, running
from budget_world import BudgetWorld
from chromium import PHONE, WIDE, Page
from traffic import ACTORS, PICTURE_MS, scene

from proxy.admin.audit import AuditLog
from proxy.admin.server import AdminServer

CLIENTS = "document.querySelectorAll('#clients tr').length"
QUERIES = "document.querySelectorAll('#queries > tr:not(.below)').length"
PIPELINES = "document.querySelectorAll('#pipelines > li').length"
CHANGES = "document.querySelectorAll('#changes > tr').length"
OPEN_QUERY = "#queries > tr.below:not([hidden])"
PARTITIONS = f"document.querySelectorAll('{OPEN_QUERY} .partitions tbody tr').length"


def query_row(name: str) -> str:
    """Return an expression for the row of a query."""
    return (
        f"[...document.querySelectorAll('#queries > tr')].find(r => r.innerText.includes({name!r}))"
    )


def pipeline_item(name: str) -> str:
    """Return an expression for the element of a pipeline."""
    return (
        "[...document.querySelectorAll('#pipelines > li')]"
        f".find(each => each.querySelector('h3').innerText === {name!r})"
    )


@asynccontextmanager
async def visited(server: AdminServer, page: Page) -> AsyncIterator[str]:
    """Give the page's URL; in the end nothing may have gone wrong in it, nor asked elsewhere."""
    async with running(server) as address:
        yield f"{address}/"
        assert page.complaints == []
    assert {urlsplit(each).netloc for each in page.urls} == {urlsplit(address).netloc}


@dataclass(frozen=True, slots=True)
class Scene:
    """What there is to show, and when the page shows it."""

    server: Callable[[], AdminServer]
    shown: str
    """An expression that is true then."""


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do in the page; `done` is true once it shows."""

    script: str
    done: str

    async def take(self, page: Page) -> None:
        await page.run(self.script)
        await page.until(self.done)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page, and how to see all of it."""

    scene: Scene
    unfold: Step
    pictured: Scene
    pictures: Mapping[str, Mapping[str, Any]]
    """How the reader looks, by the name of the picture."""
    before_picture: tuple[Step, ...] = ()


def _pictures(name: str) -> Mapping[str, Mapping[str, Any]]:
    return {
        name: {**WIDE, "scale": 1.5},
        f"{name}-dark": {**WIDE, "dark": True},
        f"{name}-phone": {**PHONE, "height": 2600, "scale": 2},
    }


def _in_sight(card: str) -> Step:
    return Step(f"document.getElementById('{card}').scrollIntoView()", "true")


def _after_traffic(*how: Any) -> AdminServer:
    """Return a server that was there all the time; `how` is as of `scene`."""
    world = AdminWorld()
    server = world.server()
    scene(world, *how)
    return server


def _unbounded() -> AdminServer:
    """Return a server with many clients that no rule bounds."""
    world = AdminWorld(())
    for number in range(40):
        hidden = "\N{ZERO WIDTH SPACE}" * (number % 4)
        world.connect(f"et{hidden}l-{number}", user=None if number % 2 else "alice")
    world.connect("an-id-of-many-parts-" * 10)
    return world.server()


def _times() -> AdminServer:
    """Return a server that has measured requests of all kinds."""
    world = AdminWorld()
    times_s = (0.00002, 0.0004, 0.0123, 0.51, 7.3, 30.0)
    for number, api in enumerate(("Fetch", "Produce", "ListOffsets", "ConsumerGroupHeartbeat")):
        parts = {
            part: {"p50_s": times_s[number], "p99_s": times_s[(number + shift) % len(times_s)]}
            for shift, part in enumerate(("broker", "proxy", "hold"), start=1)
        }
        world.request_times.append({"api": api, "measured": 10 ** (6 - number), **parts})
    return world.server()


_TIMES = Scene(_times, "document.querySelectorAll('#times > tr').length === 4")


def changed_world() -> AdminWorld:
    """Return a world in which people and the file have changed something."""
    world = AdminWorld()
    of_file = {"consumer_byte_rate": "10MiB per second", "scope": "each", "source": "file"}
    override = {**of_file, "consumer_byte_rate": "20MiB per second", "source": "override"}
    many = {f"quotas.rules[client-id=etl-{n}].consumer_byte_rate": "1MiB" for n in range(9)}
    changes: list[tuple[str, str | None, str, object, object]] = [
        ("file", None, "configuration", {}, {**many, "more": "312 further keys"}),
        ("night-shift", "10.20.30.40", "quota client-id=etl-orders", of_file, override),
        ("local", "127.0.0.1", f"quota user={'x' * 200}", None, {**override, "by": HOSTILE}),
        (HOSTILE, "::1", f"quota {HOSTILE}", True, "et\u200bl"),
    ]
    for number, (who, address, what, before, after) in enumerate(changes, 1):
        about = {"number": number, "at_s": 1_790_000_000.0, "who": who, "address": address}
        change: Any = {**about, "what": what, "before": before, "after": after}
        world.store.put(f"audit/{number:015}", change)
    world.audit = AuditLog(world.store)
    return world


_CHANGED = Scene(lambda: changed_world().server(), f"{CHANGES} === 4")
_BUDGETS = Scene(lambda: BudgetWorld().server(), f"{CLIENTS} === 6")
_UNBOUNDED = Scene(_unbounded, "document.querySelectorAll('#unbounded > li').length === 41")
_QUERIES = Scene(lambda: spark_world.scene().server(), f"{QUERIES} === 5")
_PIPELINES = Scene(lambda: pipeline_world.scene().server(), f"{PIPELINES} === 3")

SECTIONS = {
    "clients": Section(
        scene=Scene(_after_traffic, f"{CLIENTS} === 7"),
        unfold=Step(
            "document.querySelectorAll('summary').forEach(each => each.click())",
            "document.querySelectorAll('details[open] .why > *').length >= 7",
        ),
        pictured=Scene(lambda: _after_traffic(ACTORS[:-1], PICTURE_MS), f"{CLIENTS} === 6"),
        pictures={
            "wide": {**WIDE, "scale": 1.5},
            "dark": {**WIDE, "dark": True},
            "phone": {**PHONE, "scale": 2},
            "wall": {"width": 2560, "height": 1440},
        },
    ),
    "budgets": Section(
        scene=_BUDGETS,
        unfold=Step(
            "document.querySelectorAll('summary').forEach(each => each.click())",
            "document.querySelectorAll('details[open] .why > *').length >= 4",
        ),
        pictured=_BUDGETS,
        pictures=_pictures("budgets"),
    ),
    "unbounded": Section(
        scene=_UNBOUNDED,
        unfold=_in_sight("unbounded-card"),
        pictured=_UNBOUNDED,
        pictures={"unbounded": WIDE},
    ),
    "times": Section(
        scene=_TIMES,
        unfold=_in_sight("times-card"),
        pictured=_TIMES,
        pictures=_pictures("times"),
        before_picture=(_in_sight("times-card"),),
    ),
    "changes": Section(
        scene=_CHANGED,
        unfold=_in_sight("changes-card"),
        pictured=_CHANGED,
        pictures=_pictures("changes"),
        before_picture=(_in_sight("changes-card"),),
    ),
    "queries": Section(
        scene=_QUERIES,
        unfold=Step(
            "document.querySelectorAll('.more').forEach(each => each.click())",
            f"{PARTITIONS} === 12",
        ),
        pictured=_QUERIES,
        pictures=_pictures("queries"),
        before_picture=(
            Step(f"{query_row('clicks')}.querySelector('button').click()", f"{PARTITIONS} === 2"),
            _in_sight("queries-card"),
        ),
    ),
    "pipelines": Section(
        scene=_PIPELINES,
        unfold=Step(
            "document.querySelectorAll('#pipelines summary').forEach(each => each.click())",
            "document.querySelectorAll('#pipelines .why li').length > 5",
        ),
        pictured=_PIPELINES,
        pictures=_pictures("pipelines"),
        before_picture=(
            Step(
                f"{pipeline_item('orders')}.querySelector('summary').click()",
                f"{pipeline_item('orders')}.querySelectorAll('.why li').length > 2",
            ),
            _in_sight("pipelines-card"),
        ),
    ),
}
