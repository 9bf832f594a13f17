"""Pipelines over HTTP, in the status document and in the terminal."""

import json
from io import StringIO
from typing import Any
from urllib.parse import quote

import pytest
from admin_world import HOSTILE, Ask, running, serve
from pipeline_world import LATER, PipelineWorld, chain, scene
from rich.console import Console
from terminal import run_once

from proxy.admin.commands.asking_commands import FRAME_LINES
from proxy.admin.commands.top_tables import PIPELINES, draw_view
from proxy.admin.pipeline_documents import MAX_NODES, MAX_PIPELINE_SUMMARIES
from proxy.admin.query_documents import COST_FACTOR, QueryDocuments
from proxy.slices import TimeSlicer


@pytest.fixture
def shown() -> PipelineWorld:
    return scene()


async def get(world: PipelineWorld, path: str) -> Any:
    async with serve(world.server()) as ask:
        answer = await ask("GET", path)
        assert answer.status == 200, answer.text
        return answer.json


async def test_pipelines_are_given_in_full(shown: PipelineWorld):
    orders, clicks, hostile = (await get(shown, "/v1/pipelines"))["pipelines"]
    assert [each["name"] for each in (orders, clicks)] == ["orders", "clicks"]
    assert [stage["name"] for stage in orders["stages"]] == ["enrich", "store"]
    assert orders["stages"][0]["held_by"] == ["store"]
    assert orders["events"][-1]["node"] == "feed-orders"
    assert orders["completion"]["pending"]["first"][0]["waits_at"] == "store"
    assert hostile["name"] == f"p {HOSTILE}"


async def test_one_pipeline_can_be_asked_for(shown: PipelineWorld):
    async with serve(shown.server()) as ask:
        for name in shown.lines:
            answer = await ask("GET", f"/v1/pipelines?pipeline={quote(name)}")
            (only,) = answer.json["pipelines"]
            assert only["name"] == name
        for name in ("other", "", "%00", "%3Cscript%3E", "enrich"):
            answer = await ask("GET", f"/v1/pipelines?pipeline={name}")
            assert answer.status == 404
            assert set(answer.json) == {"error", "fix"}
            assert "GET /v1/pipelines" in answer.json["fix"]
        assert (await ask("POST", "/v1/pipelines", data=b"{}")).status == 405


async def test_there_may_be_no_pipelines(ask: Ask):
    assert (await ask("GET", "/v1/pipelines")).json == {"pipelines": []}
    status = (await ask("GET", "/v1/status")).json
    assert (status["pipelines_total"], status["pipelines"]) == (0, [])


async def test_the_status_tells_pipelines_briefly(shown: PipelineWorld):
    status = await get(shown, "/v1/status")
    assert status["pipelines_total"] == 3
    # The full one first, then the one of which something is held.
    orders, hostile, clicks = status["pipelines"]
    assert [each["name"] for each in (orders, hostile, clicks)] == [
        "orders",
        f"p {HOSTILE}",
        "clicks",
    ]
    enrich, store = orders["stages"]
    assert enrich == {
        "name": "enrich",
        "state": "reduced",
        "rate": pytest.approx(285.714, rel=1e-4),
        "normal_rate": 2000.0,
        "measured_rate": 1400.0,
        "held_by": ["store"],
        "reason": "store asks for less: 10 of 10 samples are above its band, 1,500.0/s on average; "
        "it processes 400.0/s",
        "since_s": enrich["since_s"],
        "upstream": ["feed-orders"],
        "alive": True,
        "received_rate": 1400.0,
        "processing_rate": 400.0,
        "lag": 20_000,
        "waits": None,
    }
    assert (store["state"], store["rate"], store["reason"]) == ("uncontrolled", None, None)
    assert orders["sources"][0]["name"] == "feed-orders"
    assert orders["pending"] == {
        "batches": 5,
        "size_bytes": 500_000,
        "max_batches": 5,
        "max_bytes": None,
        "full": True,
    }
    assert (orders["completed"], orders["failed"], orders["timed_out"]) == (7, 0, 1)
    oldest = orders["oldest"]
    assert (oldest["stage"], oldest["batch"], oldest["waits_at"]) == ("enrich", 8, "store")
    assert oldest["age_s"] == pytest.approx(32.0)
    assert (clicks["pending"]["full"], clicks["oldest"], clicks["completed"]) == (False, None, 12)


async def test_the_status_shows_a_limited_number_of_pipelines_and_stages():
    many = [f"stage-{number:02}" for number in range(MAX_NODES + 12)]
    world = PipelineWorld(
        *(chain(f"p{number}", f"s{number}") for number in range(MAX_PIPELINE_SUMMARIES + 5)),
        chain("long", *many),
    )
    # The last stage is too slow: the one before is held, and then the ones before that.
    world.run(15, {many[-1]: (1500.0, 100.0, 5000)})
    status = await get(world, "/v1/status")
    assert status["pipelines_total"] == MAX_PIPELINE_SUMMARIES + 6
    assert len(status["pipelines"]) == MAX_PIPELINE_SUMMARIES
    long = status["pipelines"][0]
    assert (long["name"], long["stages_total"]) == ("long", len(many))
    names = [stage["name"] for stage in long["stages"]]
    assert names == [*many[: MAX_NODES - 1], many[-2]]
    assert len((await get(world, "/v1/pipelines"))["pipelines"]) == MAX_PIPELINE_SUMMARIES + 6


async def test_an_answer_does_not_grow_with_what_is_in_flight(shown: PipelineWorld):
    line = shown.lines["clicks"]
    for _ in range(3000):
        line.batch(line.settings.stages[0], 10, shown.now_ms)
    (clicks,) = (await get(shown, "/v1/pipelines?pipeline=clicks"))["pipelines"]
    assert clicks["completion"]["pending"]["batches"] == 3000
    assert len(json.dumps(clicks)) < 50_000
    status = await get(shown, "/v1/status")
    assert len(json.dumps(status["pipelines"])) < 5_000


class Slow(PipelineWorld):
    """A world in which it takes a while to find out about pipelines."""

    asked = 0

    def clock(self) -> float:
        return self.now_ms

    def pipelines(self) -> Any:
        self.asked += 1
        self.now_ms += 100.0
        return super().pipelines()


async def test_what_is_dear_to_make_is_made_seldom():
    slow = Slow(chain("orders", "only"))
    queries = QueryDocuments(slow, TimeSlicer(), clock_ms=slow.clock, cpu_ms=slow.clock)
    for _ in range(10):
        await queries.pipelines()
    assert slow.asked == 1
    slow.now_ms += 100.0 * COST_FACTOR
    await queries.pipelines()
    assert slow.asked == 2


async def printed(world: PipelineWorld, width: int) -> str:
    async with running(world.server()) as url:
        return await run_once(url, width)


async def test_pipelines_follow_in_the_terminal(shown: PipelineWorld):
    out = await printed(shown, 200)
    assert "pipelines 3 (4 held)" in out
    assert "3 of 3 pipelines" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("orders "))
    text = "\n".join(lines[start:])
    for part in (
        "orders 5 of 5 pending, FULL, 1 timed out",
        "feed-orders source, held by enrich",
        "enrich held by store 286 2,000 1,400 400 20,000 store asks for less",
        "store not held - 2,000 400 410 9,000 -",
        "7 completed; batch 8 waits at store, 32 s old",
        "clicks 0 pending",
    ):
        assert part in text
    assert "pipelines" not in await printed(PipelineWorld(), 200)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 150, 200])
async def test_pipelines_fit_the_terminal(shown: PipelineWorld, width: int):
    lines = (await printed(shown, width)).splitlines()
    assert max(map(len, lines)) <= width
    (line,) = (line for line in lines if line.startswith("  enrich "))
    assert "286" in line
    assert "20,000" in line


async def test_pipelines_are_cut_to_the_rows_that_fit(shown: PipelineWorld):
    status = await get(shown, "/v1/status")
    for order, first in (("held", "orders"), ("name", "clicks")):
        out = StringIO()
        Console(file=out, width=120).print(draw_view(status, order, 120, 4, (PIPELINES,)))
        lines = out.getvalue().splitlines()
        assert len(lines) <= 4 + FRAME_LINES
        assert "3 of 3 pipelines" in lines[-1]
        assert "lines do not fit" in lines[-1]
        assert first in out.getvalue()
        assert HOSTILE not in out.getvalue()


async def test_what_is_released_and_silent_is_said(shown: PipelineWorld):
    shown.run(310, {name: rates for name, rates in LATER.items() if name not in ("store", "after")})
    out = await printed(shown, 200)
    assert "not held, silent" in out
