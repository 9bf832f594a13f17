"""What the commands say of a mistake: what, where, how to mend it, and never a traceback."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from proxy.admin.commands import operator_commands
from proxy.admin.commands.operator_commands import AdminClientError, AdminPortClient
from proxy.cli import main

NOBODY = "http://127.0.0.1:1"
COMMANDS = (["top", "--once"], ["connections"], ["tier"], ["pause"], ["resume"], ["suggest"])


@asynccontextmanager
async def other_server(
    body: bytes, head: bytes = b"HTTP/1.0 200 OK\r\n\r\n", endless: bytes = b""
) -> AsyncIterator[str]:
    """Serve what some other program might answer, and something over and over again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + body)
        with suppress(ConnectionError):
            while endless:
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


KEYS: Sequence[str] = (
    *("throttling", "yaml", "client_counts", "unbounded", "followed", "pipelines"),
    *("pipelines_total", "connections", "total", "matching", "settled", "slots", "members"),
    "machines",
)
"""Of answers to the commands."""

NO_ANSWERS = {
    **{repr(body): body for body in (b"[]", b"{}", b"null", b"<html>", b"\xff\xfe", b"")},
    "deep": b"[" * 200_000,
    "numbers": json.dumps(dict.fromkeys(KEYS, 1)).encode(),
}


@pytest.mark.parametrize("body", NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_another_server_is_no_proxy(capfd, command: list[str], body: bytes):
    async with other_server(body) as url:
        code = await asyncio.to_thread(main, [*command, "--url", url])
    said = capfd.readouterr().err
    assert (code, url in said, "fix:" in said) == (1, True, True)


CHECKED = """\
cluster: {bootstrap_servers: [127.0.0.1:1]}
listeners: [{name: a, bind: 127.0.0.1:2, advertised_host: 127.0.0.1, broker_ports: 3-4}]
"""

LISTS = ("quotas", "connections", "queries", "listeners")
ODD_ROWS = {
    "no lists": dict.fromkeys(LISTS, 1),
    "texts": {key: ["a"] for key in LISTS},
    "no rules, and texts": {key: [] if key == "quotas" else ["a"] for key in LISTS},
    "empty": {key: [] for key in LISTS},
}


@pytest.mark.parametrize("document", ODD_ROWS.values(), ids=ODD_ROWS.keys())
async def test_the_doctor_finds_that_another_server_is_no_proxy(capfd, tmp_path, document):
    (tmp_path / "proxy.yaml").write_text(CHECKED)
    async with other_server(json.dumps(document).encode()) as url:
        command = ["doctor", "etl", "-c", str(tmp_path / "proxy.yaml"), "--url", url]
        code = await asyncio.to_thread(main, command)
    said = "".join(capfd.readouterr())
    assert (code, f"{url} is not a quota proxy of this version" in said) == (1, True)


@pytest.mark.parametrize("limit", ["WALK_LIMIT_S", "MAX_REPLY_BYTES"])
async def test_a_list_without_an_end_is_given_up(monkeypatch, limit: str):
    monkeypatch.setattr(operator_commands, limit, 0.2 if limit == "WALK_LIMIT_S" else 1000)
    async with other_server(b'{"quotas": [], "next": "x"}') as url:
        with pytest.raises(AdminClientError, match="/v1/quotas does not end"):
            await asyncio.to_thread(AdminPortClient(url).rows, "/v1/quotas", "quotas")


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"error": "\\u001b[31m", "fix": "\\u0007"}'])
async def test_a_refusal_steers_no_terminal(capfd, body: bytes):
    async with other_server(body, b"HTTP/1.0 400 \x1b[32m\r\n\r\n") as url:
        code = await asyncio.to_thread(main, ["tier", "--url", url])
    said = capfd.readouterr().err
    assert (code, said.count("\\x1b[3"), "\x1b" in said, "\x07" in said) == (2, 1, False, False)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\nx: "])
async def test_an_answer_that_trickles_for_ever_is_given_up(head: bytes):
    async with other_server(b"", head, b" ") as url:
        with pytest.raises(AdminClientError):
            await asyncio.to_thread(AdminPortClient(url, timeout_s=0.2).read, "/metrics")


async def test_an_answer_that_has_no_end_is_given_up(monkeypatch):
    monkeypatch.setattr(operator_commands, "MAX_REPLY_BYTES", 1 << 20)
    async with other_server(b"", endless=b" " * (1 << 18)) as url:
        with pytest.raises(AdminClientError, match="its answer is above 1048576 bytes"):
            await asyncio.to_thread(AdminPortClient(url).read, "/metrics")


async def test_an_answer_that_is_cut_off_is_none():
    async with other_server(b"{}", b"HTTP/1.0 200 OK\r\nContent-Length: 10\r\n\r\n") as url:
        with pytest.raises(AdminClientError, match="not completed"):
            await asyncio.to_thread(AdminPortClient(url).read, "/metrics")


async def test_rules_that_steer_the_terminal_are_escaped(capfd):
    async with other_server(b'{"yaml": "rules:\\n  # \\u001b[31m\\n"}') as url:
        code = await asyncio.to_thread(main, ["suggest", "--url", url])
    assert (code, capfd.readouterr().out) == (0, "rules:\n  # \\x1b[31m\n")


@pytest.mark.parametrize("command", [["connections", "--filter"], ["suggest", "--since"]])
async def test_an_option_that_is_no_text_is_sent_as_it_is(capfd, command: list[str]):
    async with other_server(b"{}") as url:
        code = await asyncio.to_thread(main, [*command, os.fsdecode(b"\xff"), "--url", url])
    assert (code, "not a quota proxy" in capfd.readouterr().err) == (1, True)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://a b", "not a URL such as"),
        ("ftp://x", "not a URL such as"),
        ("x", "not a URL such as"),
        ("http://127.0.0.1:0", "not a URL such as"),
        ("http://127.0.0.1:99999", "Port out of range"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_no_address_is_bad_input(capfd, command: list[str], url: str, why: str):
    assert main([*command, "--url", url]) == 2
    said = capfd.readouterr().err
    assert (url in said, why in said, "fix:" in said) == (True, True, True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(b"\xff\xfe\x00", "is not text", id="binary"),
        pytest.param(b"top-secret\nanother", "holds no token", id="two lines"),
        pytest.param(b" \n", "holds no token", id="empty"),
        pytest.param(b"a" * 20_000, "holds no token", id="too long"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_file_without_a_token(
    capfd, tmp_path: Path, command: list[str], content: bytes, expected: str
):
    path = tmp_path / "token"
    path.write_bytes(content)
    assert main([*command, "--url", NOBODY, "--token-file", str(path)]) == 2
    said = capfd.readouterr().err
    assert f"--token-file {path}: {expected}" in said
    assert "fix:" in said
    assert "secret" not in said


@pytest.mark.parametrize("option", ["--ca-file", "--cert-file", "--token-file"])
@pytest.mark.parametrize("name", ["none", "."])
def test_the_file_that_is_missing_is_named(capfd, tmp_path: Path, option: str, name: str):
    path = tmp_path / name
    assert main(["pause", "--url", NOBODY, option, str(path)]) == 2
    said = capfd.readouterr().err
    assert f"{option} {path}: " in said
    assert "fix:" in said


@pytest.mark.parametrize("option", ["--ca-file", "--cert-file"])
def test_the_file_without_a_certificate_is_named(capfd, tmp_path: Path, option: str):
    path = tmp_path / "empty.pem"
    path.touch()
    assert main(["suggest", "--url", NOBODY, option, str(path)]) == 2
    assert f"{option} {path}: " in capfd.readouterr().err


def test_a_reader_that_has_enough_is_no_mistake(capfd, tmp_path: Path, monkeypatch):
    path = tmp_path / "quota-proxy.yaml"
    path.write_text(
        "cluster: {bootstrap_servers: [b:9092]}\n"
        "listeners: [{name: a, bind: '127.0.0.1:0', advertised_host: a, broker_ports: 0}]\n"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as printed:
        monkeypatch.setattr(sys, "stdout", printed)
        code = main(["check", "-c", str(path)])
    assert (code, capfd.readouterr().err) == (1, "")
