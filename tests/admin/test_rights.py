"""Each token may do what its rights say and nobody else may; which names the server answers to."""

import asyncio
from dataclasses import replace

import pytest
from admin_world import AdminWorld, running, serve
from tokens import CLOSED, OPEN, TOKENS, bearer, password

from proxy.admin.port.guard import OPEN_PATHS, AccessRight, AccessRules, AdminToken

ETL = "/v1/quotas/client-id=etl-orders"
REPORTS = "/v1/spark/batches"
LIMIT_S = 20
BODY = {"consumer_byte_rate": "1MiB"}

CHANGES = (
    ("PUT", ETL),
    ("DELETE", ETL),
    ("POST", "/v1/no-such-path"),
    ("POST", "/v1/spark/batches/"),
    ("POST", "/v1/%73park/batches/x"),
)
"""Whatever is not known to be harmless is a change."""


@pytest.mark.parametrize(("method", "path"), CHANGES)
@pytest.mark.parametrize(("name", "may"), [("ops", 1), ("spark", 0), ("desk", 0), ("night", 1)])
async def test_who_has_no_right_to_it_changes_nothing(
    world: AdminWorld, method: str, path: str, name: str, may: bool
):
    async with serve(world.server(access=OPEN)) as ask:
        answer = await ask(method, path, headers=bearer(name), json=BODY)
    assert (answer.status == 403) is not may
    if not may:
        assert f"the token '{name}' may not change this" in answer.json["error"]
        assert "quotas" in answer.json["fix"]
        assert "WWW-Authenticate" not in answer.headers
        assert len(world.rules.composed.entries) == 4


async def test_every_path_asks_for_the_right_to_it(world: AdminWorld):
    """Also one that is added later: the paths are those that the server knows."""
    server = world.server(access=CLOSED)
    async with serve(server) as ask:
        asked = {
            (route.method, route.resource.canonical.replace("{tail}", "x"))
            for route in server.application().router.routes()
            if route.resource is not None
        }
        for method, path in asked:
            if path in OPEN_PATHS:
                continue
            right = AccessRight.READ if method in {"GET", "HEAD"} else AccessRight.QUOTAS
            right = AccessRight.REPORT if path == REPORTS else right
            assert (await ask(method, path)).status == 401, (method, path)
            for token in TOKENS:
                answer = await ask(method, path, headers=bearer(token.name))
                assert (answer.status == 403) is (right not in token.rights), (method, path, token)
    assert {method for method, _ in asked} == {"GET", "HEAD", "PUT", "POST", "DELETE"}
    changing = {path for method, path in asked if method not in {"GET", "HEAD"}}
    assert {"/v1/throttling", "/v1/log_level", "/v1/connections/x", "/v1/quotas/x"} < changing


@pytest.mark.parametrize("path", [REPORTS, "/v1/spark/%62atches"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (bearer("ops"), 415),
        (bearer("spark"), 415),  # let in: what follows is that the body is none
        (bearer("desk"), 403),
        (bearer("night"), 403),
        (bearer("nobody"), 401),
        ({}, 401),
        (password("spark"), 401),  # browsers send those by themselves
    ],
)
async def test_reports_are_for_those_who_may_report(
    world: AdminWorld, path: str, headers: dict[str, str], status: int
):
    async with serve(world.server(access=OPEN)) as ask:
        answer = await ask("POST", path, headers=headers)
    assert answer.status == status, answer.text
    assert ("WWW-Authenticate" in answer.headers) == (status == 401)


@pytest.mark.parametrize("path", ["/", "/page/page.js", "/v1/status", "/v1/audit", "/v1/quotas"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        (bearer("nobody"), 401),
        (bearer("spark"), 403),
        (bearer("night"), 403),
        (bearer("desk"), 200),
        (bearer("ops"), 200),
        (password("desk"), 200),
        (password("desk", "anna"), 200),
        (password("spark"), 403),
        (password("nobody"), 401),
        ({"Authorization": "Basic desk-text"}, 401),
        ({"Authorization": "Basic !"}, 401),
        ({"Authorization": "basic " + "A" * 4000}, 401),
        ({"Authorization": "BEARER  desk-text "}, 200),
    ],
)
async def test_reading_may_be_closed(
    world: AdminWorld, path: str, headers: dict[str, str], status: int
):
    async with serve(world.server(access=CLOSED)) as ask:
        answer = await ask("GET", path, headers=headers)
        assert answer.status == status, answer.text
        assert answer.headers.get("WWW-Authenticate", "").startswith("Basic") == (status == 401)
        assert (await ask("HEAD", path, headers=headers)).status == status


@pytest.mark.parametrize("path", OPEN_PATHS)
async def test_probes_and_scrapes_stay_open_unless_they_are_closed(world: AdminWorld, path: str):
    async with serve(world.server(access=CLOSED)) as ask:
        assert (await ask("GET", path, headers={"Host": "any.example"})).status == 200
    async with serve(world.server(access=replace(CLOSED, open_paths=()))) as ask:
        assert (await ask("GET", path)).status == 401
        assert (await ask("GET", path, headers=bearer("desk"))).status == 200


async def test_reading_is_open_with_tokens_too_unless_it_is_closed(world: AdminWorld):
    async with serve(world.server(access=OPEN)) as ask:
        for headers in ({}, bearer("spark"), bearer("nobody"), password("nobody")):
            assert (await ask("GET", "/v1/status", headers=headers)).status == 200


HOSTS = {
    "127.0.0.1": 200,
    "[::1]:9644": 200,
    "10.1.2.3:9644": 200,
    "localhost:9644": 200,
    "LocalHost": 200,
    "proxy.example": 200,
    "Proxy.Example.:9644": 200,
    "rebound.example": 421,
    "proxy.example.evil.example": 421,
    "evil.example:proxy.example": 421,
    "proxy.example@evil.example": 421,
    "evil.example#proxy.example": 421,
    "": 421,
    "[::1": 421,
}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    "access", [OPEN, AccessRules(hosts=OPEN.hosts)], ids=["tokens", "no tokens"]
)
async def test_only_known_names_are_answered_without_a_token(
    world: AdminWorld, access: AccessRules, host: str
):
    async with serve(world.server(access=access)) as ask:
        assert (await ask("GET", "/v1/status", headers={"Host": host})).status == HOSTS[host]
        if access.tokens:
            shown = {"Host": host, **bearer("spark")}
            assert (await ask("GET", "/v1/status", headers=shown)).status == 200


HOSTILE_HEADERS = {
    "two tokens, the right one last": (
        401,
        "Authorization: Bearer nobody-text\r\nAuthorization: Bearer ops-text",
    ),
    "a token without its scheme": (401, "Authorization: ops-text"),
    "two schemes": (401, "Authorization: Basic Bearer ops-text"),
    "a list of tokens": (401, "Authorization: Bearer nobody-text, ops-text"),
    "a tab in the place of the space": (401, "Authorization: Bearer\tops-text"),
    "bytes that are no text": (401, "Authorization: Bearer \udcff\udcfe"),
    "a token of many bytes": (401, f"Authorization: Bearer {'x' * 8000}"),
    "a folded line": (400, "Authorization: Bearer\r\n ops-text"),
    "a control character": (400, "Authorization: Bearer ops-text\x00"),
    "another method by a header": (401, "X-HTTP-Method-Override: GET"),
    "another path by a header": (401, "X-Original-URL: /v1/spark/batches"),
    "a token in a cookie": (401, "Cookie: Authorization=Bearer ops-text"),
}


@pytest.mark.parametrize(("status", "headers"), HOSTILE_HEADERS.values(), ids=HOSTILE_HEADERS)
async def test_hostile_headers_open_nothing(world: AdminWorld, status: int, headers: str):
    server = world.server(access=OPEN)
    async with running(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"DELETE {ETL} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n\r\n"
        writer.write(head.encode("utf-8", "surrogateescape"))
        answer = await asyncio.wait_for(reader.read(), LIMIT_S)
        writer.close()
    assert answer.split()[1] == str(status).encode(), answer
    assert b"Traceback" not in answer
    assert len(world.rules.composed.entries) == 4


async def test_tokens_may_be_replaced_while_it_runs(world: AdminWorld):
    server = world.server(access=OPEN)
    async with serve(server) as ask:
        server.guard.access = AccessRules((AdminToken("ops", "new-text"),))
        assert (await ask("PUT", ETL, headers=bearer("ops"), json=BODY)).status == 401
        new = {"Authorization": "Bearer new-text"}
        assert (await ask("PUT", ETL, headers=new, json=BODY)).status == 200


def test_a_token_is_not_shown():
    assert "text" not in repr(TOKENS[0])
    assert "ops-text" not in repr(OPEN)
