"""docs/api.md has each path, and with its two neighbours each field."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from admin_world import AdminWorld, Ask, serve
from connected import HELD, PLAIN, Connected
from pipeline_world import scene as pipelines
from spark_world import scene as queries
from tier_world import TierWorld
from traffic import play

from proxy.admin.pipeline_documents import COMPLETION, NODE, PIPELINE_ROW, STAGE
from proxy.admin.query_documents import PARTITION, QUERY

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "api.md").read_text()
QUERIES = (DOCS / "api-queries.md").read_text()
ALL = API + QUERIES + (DOCS / "admin-port.md").read_text()
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`]+`", ALL, re.DOTALL))))
DATA = {"before", "after", "bounds", "delay_queues", "failed", "keys", "refused"}
"""Fields of which the keys are what an operator, or a client, has named."""
PATHS = ("status?by=client", "clients", "connections", "quotas", "throttling", "log_level", "audit")


def fields(document: Any) -> Iterator[str]:
    """Yield the names of the fields at all depths."""
    if isinstance(document, dict):
        for name, value in document.items():
            yield name
            if name not in DATA or not isinstance(value, dict):
                yield from fields(value)
    elif isinstance(document, list):
        for each in document:
            yield from fields(each)


async def described(ask: Ask, *paths: str) -> None:
    """Check that each field of these documents is in the text."""
    found: set[str] = set()
    for path in paths:
        answer = await ask("GET", f"/v1/{path}")
        assert answer.status == 200
        found |= set(fields(answer.json))
    assert len(found) > 5
    assert found - NAMED == set()


async def test_fields_of_clients_and_rules(world: AdminWorld):
    play(world)
    world.sample()
    async with serve(world.server(connections=Connected([HELD, PLAIN]))) as ask:
        body = {"consumer_byte_rate": "1MiB", "by": "anna", "until": "2h"}
        assert (await ask("PUT", "/v1/quotas/client-id=etl-orders", json=body)).status == 200
        pause = {"off": "30m", "client-id": "x"}
        assert (await ask("POST", "/v1/throttling", json=pause)).status == 200
        await described(ask, *PATHS, "clients/client-id=etl-orders", "suggestions")


@pytest.mark.parametrize(
    ("make", "path"), [(queries, "progress"), (pipelines, "pipelines")], ids=["spark", "pipelines"]
)
async def test_fields_of_queries_and_pipelines(make: Any, path: str):
    async with serve(make().server()) as ask:
        await described(ask, path, "status")


async def test_tables_of_queries_and_pipelines_have_the_fields():
    async with serve(queries().server()) as ask:
        found = (await ask("GET", "/v1/progress")).json["queries"]
    async with serve(pipelines().server()) as ask:
        shown = (await ask("GET", "/v1/pipelines")).json["pipelines"]
    nodes = [node for each in shown for node in (*each["sources"], *each["stages"])]
    partitions = [each for query in found for each in query["partitions"]]
    assert set(QUERY.names) == set(found[0])
    assert set(PARTITION.names) == set(partitions[0])
    assert set(PIPELINE_ROW.names) == set(shown[0])
    assert set(COMPLETION.names) == set(shown[0]["completion"])
    assert {*NODE.names, *STAGE.names} == set().union(*nodes)
    assert set(NODE.names) == set(shown[0]["sources"][0])


async def test_each_path_is_in_the_table():
    tier = TierWorld()
    async with tier.running():
        routes = {
            (route.method, resource.canonical.removesuffix("{tail}"))
            for resource in tier.servers["a/0"].application().router.resources()
            for route in resource
            if route.method != "HEAD"
        }
    shown = set(re.findall(r"`(GET|PUT|POST|DELETE) (/[^`?{]*)", API))
    hidden = ("/page/", "/member/", "/v1/tier/")
    assert {each for each in routes - shown if not each[1].startswith(hidden)} == set()
    for method, path in shown:
        assert any(method == of and path.startswith(known) for of, known in routes), path
