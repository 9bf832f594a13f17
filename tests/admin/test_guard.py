"""What must not pass is refused with the right status and a JSON error, and never with a 5xx."""

import asyncio
import hmac
import json
from types import SimpleNamespace
from typing import Any

import pytest
from admin_world import AdminWorld, Ask, running, serve
from aiohttp import StreamReader
from aiohttp.test_utils import make_mocked_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.admin.replies import MAX_BODY_BYTES, ApiError, read_json_bytes
from proxy.admin.rule_documents import parse_override
from proxy.quota.entities import QuotaKind
from proxy.quota.rule_registry import RuleEntry
from proxy.relay.ports import ListenerError

ETL = "/v1/quotas/client-id=etl-orders"
GOOD = b'{"consumer_byte_rate": "10MiB"}'
JSON = {"Content-Type": "application/json"}
TOKEN = {"Authorization": "Bearer secret"}


def body(**keys: Any) -> bytes:
    return json.dumps(keys).encode()


BadRequest = tuple[int, str, str, bytes, dict[str, str]]

BAD_REQUESTS: dict[str, BadRequest] = {
    "no body": (400, "PUT", ETL, b"", JSON),
    "not JSON": (400, "PUT", ETL, b"{", JSON),
    "not UTF-8": (400, "PUT", ETL, b'{"by": "\xff"}', JSON),
    "not an object": (400, "PUT", ETL, b"[1]", JSON),
    "nested deeply": (400, "PUT", ETL, b"[" * 60_000, JSON),
    "no quota": (400, "PUT", ETL, body(by="anna"), JSON),
    "unknown key": (400, "PUT", ETL, body(consumer_rate="1MiB"), JSON),
    "key twice in it": (
        400,
        "PUT",
        ETL,
        b'{"producer_byte_rate": 1, "producer_byte_rate": 2}',
        JSON,
    ),
    "bad size": (400, "PUT", ETL, body(consumer_byte_rate="10mb"), JSON),
    "no size": (400, "PUT", ETL, body(consumer_byte_rate=None), JSON),
    "size 0": (400, "PUT", ETL, body(producer_byte_rate=0), JSON),
    "negative percentage": (400, "PUT", ETL, body(request_percentage=-1), JSON),
    "percentage as text": (400, "PUT", ETL, body(request_percentage="50"), JSON),
    "percentage true": (400, "PUT", ETL, body(request_percentage=True), JSON),
    "percentage NaN": (400, "PUT", ETL, b'{"request_percentage": NaN}', JSON),
    "percentage 1e999": (400, "PUT", ETL, b'{"request_percentage": 1e999}', JSON),
    "percentage huge": (400, "PUT", ETL, b'{"request_percentage": 1%s}' % (b"0" * 400), JSON),
    "number too long": (400, "PUT", ETL, b'{"request_percentage": 1%s}' % (b"0" * 9000), JSON),
    "bad scope": (400, "PUT", ETL, body(consumer_byte_rate=1, scope="all"), JSON),
    "by a number": (400, "PUT", ETL, body(consumer_byte_rate=1, by=7), JSON),
    "by too long": (400, "PUT", ETL, body(consumer_byte_rate=1, by="x" * 201), JSON),
    "by not printable": (400, "PUT", ETL, body(consumer_byte_rate=1, by="a\x1b[0m"), JSON),
    "by half a character": (400, "PUT", ETL, b'{"consumer_byte_rate":1,"by":"\\ud800"}', JSON),
    "compressed": (400, "PUT", ETL, b"\x1f\x8b\x08", {**JSON, "Content-Encoding": "gzip"}),
    "no key": (400, "PUT", "/v1/quotas/etl", GOOD, JSON),
    "unknown selector key": (400, "PUT", "/v1/quotas/colour=a", GOOD, JSON),
    "no value": (400, "PUT", "/v1/quotas/user=", GOOD, JSON),
    "key twice": (400, "DELETE", "/v1/quotas/user=a,user=b", b"", {}),
    "path not UTF-8": (400, "PUT", "/v1/quotas/user=%FF", GOOD, JSON),
    "two client keys": (400, "PUT", "/v1/quotas/client-id=a,client-id-prefix=a", GOOD, JSON),
    "unknown path": (404, "GET", "/v2", b"", {}),
    "no client": (404, "GET", "/v1/clients/client-id=nobody", b"", {}),
    "out of the folder": (404, "GET", "/page/../server.py", b"", {}),
    "another path in disguise": (405, "DELETE", "/v1/clients/../quotas/user=a", b"", {}),
    "no override": (404, "DELETE", ETL, b"", {}),
    "wrong method": (405, "POST", "/v1/quotas", b"", {}),
    "delete status": (405, "DELETE", "/v1/status", b"", {}),
    "too large": (413, "PUT", ETL, b" " * (MAX_BODY_BYTES + 1), JSON),
    "a form": (415, "PUT", ETL, GOOD, {"Content-Type": "application/x-www-form-urlencoded"}),
    "no content type": (415, "PUT", ETL, GOOD, {"Content-Type": ""}),
    "foreign host": (421, "GET", "/v1/status", b"", {"Host": "rebound.example"}),
    "foreign host, like ours": (421, "GET", "/", b"", {"Host": "127.0.0.1.evil.example:9644"}),
    "broken host": (421, "GET", "/", b"", {"Host": "[::1"}),
    "foreign page": (403, "PUT", ETL, GOOD, {**JSON, "Origin": "https://evil.example"}),
    "page without origin": (403, "DELETE", ETL, b"", {"Origin": "null"}),
}


@pytest.mark.parametrize("bad_request", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
async def test_a_bad_request_is_refused(ask: Ask, bad_request: BadRequest):
    status, method, path, data, headers = bad_request
    answer = await ask(method, path, data=data, headers=headers)
    assert answer.status == status, answer.text
    assert set(answer.json) == {"error", "fix"}
    assert all(answer.json.values())
    assert "Traceback" not in answer.text


async def test_a_body_in_chunks_is_bounded_too(ask: Ask):
    async def endless():
        for _ in range(1000):
            yield b" " * 1024

    answer = await ask("PUT", ETL, data=endless(), headers=JSON)
    assert answer.status == 413


async def exchanged(world: AdminWorld, sent: bytes) -> bytes:
    """Send bytes to a server; return what comes until it closes."""
    server = world.server()
    async with running(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        return answer


# Of one that is longer the rest is not read, and the answer may be lost to a reset.
GARBAGE = {
    "Kafka": b"\x00\x00\x00\x10\x00\x12\x00\x03\x00\x00\x00\x01\x00\x04test",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a header without end": b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
    "a bad length": b"PUT / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "two lengths": b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "two framings": b"PUT / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
}


@pytest.mark.parametrize("sent", GARBAGE.values(), ids=GARBAGE.keys())
async def test_what_is_not_http_is_refused_and_closed(world: AdminWorld, sent: bytes):
    answer = await exchanged(world, sent)
    assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
    assert b"Traceback" not in answer


@pytest.mark.parametrize("path", ["http://127.0.0.1/v1/quotas/user=a", "/v1/./quotas/user=a"])
async def test_a_path_in_another_form_is_not_guessed_at(world: AdminWorld, path: str):
    sent = f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    assert (await exchanged(world, sent)).startswith(b"HTTP/1.1 404 ")


async def test_a_refused_method_says_which_ones_work(ask: Ask):
    answer = await ask("PATCH", ETL, data=GOOD, headers=JSON)
    assert (answer.status, answer.headers["Allow"]) == (405, "DELETE, PUT")


async def test_a_defect_is_no_traceback(world: AdminWorld, capsys: pytest.CaptureFixture[str]):
    def broken() -> str:
        raise RuntimeError("a detail that is nobody's business")

    async with serve(world.server(readiness=broken)) as ask:
        answer = await ask("GET", "/v1/status")
        assert (answer.status, set(answer.json)) == (500, {"error", "fix"})
        assert "nobody's business" not in answer.text
    assert "nobody's business" in "".join(capsys.readouterr())


@pytest.mark.parametrize("host", ["localhost", "localhost:9644", "127.0.0.1:1", "[::1]:80"])
async def test_own_names_pass(ask: Ask, host: str):
    assert (await ask("GET", "/v1/status", headers={"Host": host})).status == 200


async def test_the_own_page_may_change_something(ask: Ask):
    own = {**JSON, "Host": "localhost:9644", "Origin": "http://localhost:9644"}
    assert (await ask("PUT", ETL, data=GOOD, headers=own)).status == 200


WRONG_TOKENS = {
    "none": {},
    "another": {"Authorization": "Bearer other"},
    "a part": {"Authorization": "Bearer secre"},
    "more": {"Authorization": "Bearer secrets"},
    "another scheme": {"Authorization": "Basic secret"},
    "no scheme": {"Authorization": "secret"},
    "empty": {"Authorization": "Bearer "},
    "other characters": {"Authorization": "Bearer s\u00e9cret"},
}


@pytest.mark.parametrize("headers", WRONG_TOKENS.values(), ids=WRONG_TOKENS.keys())
@pytest.mark.parametrize(("method", "path"), [("PUT", ETL), ("DELETE", ETL), ("POST", "/v1/any")])
async def test_nothing_is_changed_without_the_token(
    world: AdminWorld, ask_guarded: Ask, method: str, path: str, headers: dict[str, str]
):
    answer = await ask_guarded(method, path, data=GOOD, headers={**JSON, **headers})
    assert (answer.status, set(answer.json)) == (401, {"error", "fix"})
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert len(world.rules.composed.entries) == 4


async def test_with_the_token_all_is_open(ask_guarded: Ask):
    named = {"Host": "ops.example", **TOKEN}
    assert (await ask_guarded("GET", "/v1/status", headers=named)).status == 200
    put = await ask_guarded("PUT", ETL, data=GOOD, headers={**JSON, **TOKEN})
    assert put.status == 200
    assert (await ask_guarded("DELETE", ETL, headers=TOKEN)).status == 200


async def test_the_token_is_compared_in_constant_time(
    ask_guarded: Ask, monkeypatch: pytest.MonkeyPatch
):
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def watched(given: bytes, token: bytes) -> bool:
        compared.append((given, token))
        return compare(given, token)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    await ask_guarded("DELETE", ETL, headers={"Authorization": "Bearer wrong"})
    await ask_guarded("DELETE", ETL, headers=TOKEN)
    assert compared == [(b"wrong", b"secret"), (b"secret", b"secret")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "quota-proxy.example"])
async def test_without_a_token_only_loopback_is_bound(world: AdminWorld, host: str):
    with pytest.raises(ListenerError, match="set a token"):
        await world.server(host).start(())


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
KEYS = st.sampled_from([*map(str, QuotaKind), "scope", "by"])
BODIES = st.binary(max_size=200) | st.dictionaries(KEYS | st.text(max_size=5), VALUES).map(
    lambda keys: json.dumps(keys).encode()
)


@given(BODIES)
def test_any_body_is_an_override_or_refused(data: bytes):
    outcome: RuleEntry | ApiError
    try:
        outcome = parse_override({"client-id": "etl"}, data, 0.0)
    except ApiError as error:
        outcome = error
    assert isinstance(outcome, RuleEntry) or outcome.status == 400


PATH_BYTES = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=40)
PATHS = PATH_BYTES | st.binary(max_size=20).map(
    lambda raw: "user=" + "".join(f"%{byte:02X}" for byte in raw)
)


@given(
    st.sampled_from(["GET", "PUT", "DELETE"]),
    st.sampled_from(["/v1/quotas/", "/v1/clients/", "/"]),
    PATHS,
    BODIES,
)
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
async def test_no_request_makes_it_fail(ask: Ask, method: str, folder: str, rest: str, data: bytes):
    path = folder + rest.replace("#", "")
    answer = await ask(method, path, data=data if method == "PUT" else None, headers=JSON)
    assert answer.status < 500, answer.text
    if answer.status >= 400 and answer.json is not None:
        assert set(answer.json) == {"error", "fix"}


async def test_a_connection_that_closed_before_its_body_was_waited_for_is_no_fault() -> None:
    """As at the end of the proxy."""
    closed: Any = SimpleNamespace(connected=False)
    reader = StreamReader(closed, 1, loop=asyncio.get_running_loop())
    request = make_mocked_request("PUT", ETL, headers=JSON, payload=reader)
    with pytest.raises(ApiError, match="broken off") as caught:
        await read_json_bytes(request)
    assert caught.value.response().status == 400
