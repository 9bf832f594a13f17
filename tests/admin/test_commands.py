"""What the commands say of a mistake: what, where, how to mend it, and never a traceback."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.cli import main

NOBODY = "http://127.0.0.1:1"
COMMANDS = (["top", "--once"], ["connections"], ["tier"], ["pause"], ["resume"], ["suggest"])


@asynccontextmanager
async def other_server(body: bytes) -> AsyncIterator[str]:
    """Serve what some other program might answer, with status 200."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n" + body)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("body", [b"[]", b"{}", b"null", b"<html>", b"\xff\xfe", b""])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_another_server_is_no_proxy(capfd, command: list[str], body: bytes):
    async with other_server(body) as url:
        code = await asyncio.to_thread(main, [*command, "--url", url])
    said = capfd.readouterr().err
    assert (code, url in said, "fix:" in said) == (1, True, True)


@pytest.mark.parametrize(
    ("url", "why"),
    [
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
