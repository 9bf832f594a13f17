"""Each line of the relay's log that a client can cause goes through the one limiter."""

import ast
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from relaylab.frames import request
from relaylab.lab import LAB_HOST, no_free_descriptor, open_lab, until
from structlog.testing import capture_logs

from proxy import relay
from proxy.relay.log_limiter import LINES_AT_ONCE
from proxy.relay.pump import TAKES_WITHOUT_TRYING
from proxy.relay.requests import RequestFlow
from proxy.wire.apis import METADATA

MODULES = sorted(Path(relay.__path__[0]).glob("*.py"))
CLIENTS = 3 * LINES_AT_ONCE

OF_NO_CLIENT = {
    "brokers.BrokerConnector._probe_ended": "once when the cluster answers no more, or again",
    "brokers.BrokerConnector._probe_loop": (
        "once for each bootstrap server that led to the proxy itself"
    ),
    "brokers.BrokerConnector.__init__": (
        "a limiter of its own, for each address that the cluster gives"
    ),
    "kafka_quotas.KafkaQuotaPoller._poll": "once when the cluster's quotas change, or are not read",
    "listener.Listener._leave_out": "once for each broker of the cluster",
    "relay.Relay.drain": "at the end",
    "services.Services": "the limiter itself, and OutageLog, which has its own rule for brokers",
    **{
        f"take_over.TakeOverServer.{name}": "of other processes of the same user on this machine"
        for name in ("open", "_attend", "_is_replaced")
    },
    "take_over.Predecessor.release": "once, of the process that is replaced",
}
"""Where the log is used past the limiter for more than debug lines, and why no client can repeat
it. Debug lines are for who has asked to see each connection."""


def uses_of_the_log(node: ast.AST, scope: str) -> Iterator[str]:
    """Yield the scopes in which `_log` is used for anything but debug lines."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Attribute(value=ast.Name(id="_log"), attr="debug"):
                continue
            case ast.Name(id="_log", ctx=ast.Load()):
                yield scope
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from uses_of_the_log(child, f"{scope}.{child.name}")
            case _:
                yield from uses_of_the_log(child, scope)


def test_what_clients_can_cause_is_limited() -> None:
    used = {
        scope
        for path in MODULES
        for scope in uses_of_the_log(ast.parse(path.read_text()), path.stem)
    }
    assert used == set(OF_NO_CLIENT)


def test_the_log_has_no_other_name() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("get_logger(") == text.count("\n_log = get_logger(__name__)\n"), path
        assert "import logging" not in text, path


def test_the_walk_finds_each_way_to_use_it() -> None:
    text = """
_log.debug("x")
class C:
    field: object = make(_log.warning)
    async def f(self):
        def inner():
            _log.error("x")
        say = _log
"""
    assert list(uses_of_the_log(ast.parse(text), "m")) == ["m.C", "m.C.f.inner", "m.C.f"]


def of_event(logs: list[Any], text: str) -> list[Any]:
    return [line for line in logs if line["event"].startswith(text)]


async def test_clients_that_change_their_client_id() -> None:
    async with open_lab() as lab:
        with capture_logs() as logs:
            for _ in range(CLIENTS):
                client, broker = await lab.pair(request(METADATA, 1, 1, pack(">i", 0)))
                other = request(METADATA, 1, 2, pack(">i", 0), client_id="other")
                await client.send(other)
                assert await broker.frame() == other
    lines = of_event(logs, "client id changes")
    assert len(lines) == LINES_AT_ONCE
    assert (lines[0]["first"], lines[0]["now"], lines[0]["peer"]) == ("test", "other", "127.0.0.1")


async def test_clients_that_cause_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    async with open_lab() as lab:
        with capture_logs() as logs:
            monkeypatch.setattr(RequestFlow, "_take", fail)
            for _ in range(CLIENTS):
                client = await lab.client()
                await client.send(request(METADATA, 1, 1, pack(">i", 0)))
                await client.ended()
        assert lab.rejected("internal_error") == CLIENTS
    lines = of_event(logs, "unexpected error")
    assert len(lines) == LINES_AT_ONCE
    assert {(line["log_level"], line["reason"]) for line in lines} == {("error", "internal_error")}
    assert isinstance(lines[0]["exc_info"], ZeroDivisionError)


async def test_no_descriptors_for_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.relay.listener.OUT_OF_FILES_PAUSE_S", 0.0)
    async with open_lab() as lab:
        with closing(socket.create_connection((LAB_HOST, lab.port))), capture_logs() as logs:
            with no_free_descriptor():
                await until(lambda: lab.rejected("out_of_files") >= CLIENTS)
            await until(lambda: lab.relay.connected == 1)
    assert len(of_event(logs, "can't accept")) == LINES_AT_ONCE


async def test_no_pipes_for_splice() -> None:
    async with open_lab() as lab:
        with capture_logs() as logs, no_free_descriptor():
            for _ in range(CLIENTS * TAKES_WITHOUT_TRYING):
                assert lab.services.pipes.take() is None
    assert len(of_event(logs, "no pipe")) == 1
