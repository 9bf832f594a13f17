"""`quota-proxy top` in a terminal and without one, in front of a real server."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
from admin_world import HOSTILE, MIB, PRODUCER, AdminWorld, running, serve
from aiohttp import web
from rich.console import Console
from spark_world import scene
from terminal import run_once
from traffic import play

from proxy.admin.commands.asking_commands import run_top
from proxy.admin.commands.operator_commands import AdminClientError, AdminPortClient
from proxy.admin.commands.top_tables import QUERIES, draw_view, printable, rate_text, sorted_clients

PROGRAM = """
import sys
from proxy.admin.commands.asking_commands import AdminPortClient, run_top
sys.exit(run_top(AdminPortClient(sys.argv[1])))
"""
END_OF_SCREEN = b"\x1b[?1049l"


@pytest.fixture
async def url(world: AdminWorld) -> AsyncIterator[str]:
    server = world.server()
    play(world)
    async with running(server) as address:
        yield address


async def run_plain(url: str) -> tuple[int, str, str]:
    """Run it as for a pipe; give exit code, output, complaint."""
    out = StringIO()
    try:
        await asyncio.to_thread(run_top, AdminPortClient(url), console=Console(file=out))
    except AdminClientError as error:
        return 1, out.getvalue(), str(error)
    return 0, out.getvalue(), ""


async def test_without_a_terminal_it_prints_once(url: str):
    code, out, complaint = await run_plain(url)
    assert (code, complaint) == (0, "")
    assert "\x1b" not in out
    (line,) = (line for line in out.splitlines() if "client-id=etl-orders" in line)
    for part in ("consumer", "10 MiB/s", "103%", "quota-proxy.yaml:12", "█"):
        assert part in line
    assert "8 of 8 clients under a quota" in out
    assert "Spark queries" not in out


@pytest.fixture
async def queries_url() -> AsyncIterator[str]:
    async with running(scene().server()) as address:
        yield address


async def test_queries_follow_the_clients(queries_url: str):
    code, out, _ = await run_plain(queries_url)
    assert code == 0
    assert "queries 5 (3 in trouble)" in out
    assert out.index("clients under a quota") < out.index("5 of 5 Spark queries")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    for name, parts in {
        "payments": ("running", "1,257", "batch 7: 2,400 records", "ok"),
        "clicks": ("silent, 2 stuck", "92,300"),
        "audit": ("failed, 200 skipped",),
        "ledger": ("running, not", "FAILS"),
    }.items():
        for part in parts:
            assert part in lines[name], name
    # What needs somebody comes first.
    order = [name for name in lines if name in ("payments", "clicks", "audit", "ledger")]
    assert order == ["clicks", "audit", "ledger", "payments"]


@pytest.mark.parametrize("width", [60, 80, 100, 120, 150, 200])
async def test_queries_fit_the_terminal(queries_url: str, width: int):
    out = await run_once(queries_url, width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    (line,) = (line for line in lines if line.startswith("clicks "))
    assert "92,300" in line
    assert "…" not in out


@pytest.mark.parametrize("width", [80, 100, 120, 150, 200])
async def test_it_fits_the_terminal(url: str, width: int):
    out = await run_once(url, width)
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    (line,) = (line for line in lines if line.startswith("client-id=etl-orders"))
    assert "103%" in line
    assert "…" not in out


class Terminal:
    """The command under a pseudo-terminal of 120 columns."""

    def __init__(self, process: asyncio.subprocess.Process, descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self.seen = b""

    def press(self, key: str) -> None:
        os.write(self._descriptor, key.encode())

    def hang_up(self) -> None:
        """Let the terminal be gone; the command is told so by no signal."""
        with Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), self._descriptor)

    async def until(self, text: bytes) -> None:
        """Wait until the terminal was sent a text after what was waited for before."""
        while text not in self.seen:
            self.seen += await asyncio.to_thread(os.read, self._descriptor, 65536)
        self.seen = self.seen.split(text, 1)[1]


@pytest.fixture
async def terminal(url: str) -> AsyncIterator[Terminal]:
    async with run_in_terminal(url) as each:
        yield each


@pytest.fixture
async def queries_terminal(queries_url: str) -> AsyncIterator[Terminal]:
    async with run_in_terminal(queries_url) as each:
        yield each


@asynccontextmanager
async def run_in_terminal(url: str) -> AsyncIterator[Terminal]:
    ours, its = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        url,
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"},
        # Who runs the tests in the background may ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(its)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(ours)


async def test_keys_sort_and_quit(terminal: Terminal):
    await terminal.until(b"sorted by held")
    terminal.press("n")
    await terminal.until(b"sorted by name")
    terminal.press("x")
    terminal.press("r")
    await terminal.until(b"sorted by rate")
    terminal.press("q")
    await terminal.until(END_OF_SCREEN)
    assert await terminal.process.wait() == 0


async def test_keys_change_the_view(queries_terminal: Terminal):
    await queries_terminal.until(b"clients sorted by held")
    queries_terminal.press("s")
    await queries_terminal.until(b"Spark queries")
    await queries_terminal.until(b"queries sorted by urgency")
    queries_terminal.press("n")
    await queries_terminal.until(b"queries sorted by name")
    queries_terminal.press("p")
    await queries_terminal.until(b"0 of 0 pipelines")
    await queries_terminal.until(b"pipelines sorted by name")
    queries_terminal.press("c")
    await queries_terminal.until(b"clients sorted by name")
    queries_terminal.press("q")
    await queries_terminal.until(END_OF_SCREEN)
    assert await queries_terminal.process.wait() == 0


async def test_it_follows_the_proxy(world: AdminWorld, terminal: Terminal):
    await terminal.until(b"sorted by held")
    world.not_ready = "the Kafka cluster does not answer"
    await terminal.until(b"NOT READY")


async def test_a_warning_is_shown_while_the_proxy_is_ready(world: AdminWorld, terminal: Terminal):
    await terminal.until(b"sorted by held")
    world.warning = "the cluster is silent"
    await terminal.until(b"ready, but the cluster is silent")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_interrupted_it_leaves_the_terminal_in_order(
    terminal: Terminal, number: signal.Signals
):
    await terminal.until(b"sorted by held")
    terminal.process.send_signal(number)
    await terminal.until(END_OF_SCREEN)
    assert await terminal.process.wait() == 0


async def test_it_ends_with_its_terminal(terminal: Terminal):
    await terminal.until(b"sorted by held")
    terminal.hang_up()
    async with asyncio.timeout(60):
        # 120 is Python's, whose last flush failed.
        assert await terminal.process.wait() in (0, 1, 120)


async def test_a_proxy_that_is_not_there_is_an_error(world: AdminWorld):
    async with running(world.server()) as url:
        pass
    code, out, complaint = await run_plain(url)
    assert (code, out) == (1, "")
    assert f"{url} does not answer: " in complaint
    assert "fix: start the proxy" in complaint


@pytest.mark.parametrize("url", ["127.0.0.1:9644", "file:///etc/passwd", "http://[", ""])
async def test_what_is_no_url_is_an_error(url: str):
    code, _, complaint = await run_plain(url)
    assert code == 1
    assert "fix:" in complaint


@pytest.mark.parametrize(
    ("status", "body"), [(200, "hello"), (200, "[]"), (200, "{}"), (404, "{}"), (500, "")]
)
async def test_another_server_is_an_error(status: int, body: str):
    async def answer(_: web.BaseRequest) -> web.Response:
        return web.Response(status=status, text=body)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    code, _, complaint = await run_plain(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    await runner.cleanup()
    assert code == 1
    assert "fix:" in complaint


@pytest.mark.parametrize("order", ["held", "name"])
async def test_queries_are_cut_to_the_rows_that_fit(order: str):
    async with serve(scene().server()) as ask:
        status = (await ask("GET", "/v1/status?by=client")).json
    out = StringIO()
    Console(file=out, width=100).print(draw_view(status, order, 100, 2, (QUERIES,)))
    assert "2 of 5 Spark queries" in out.getvalue()
    assert ("clicks" in out.getvalue()) == (order == "held")
    assert (HOSTILE in out.getvalue()) == (order == "name")


async def test_hostile_client_ids_cannot_steer_the_terminal(world: AdminWorld):
    for client_id in (
        "\x1b]0;owned\x07",
        "[bold red]x[/]",
        "a\r\nb",
        "\N{RIGHT-TO-LEFT OVERRIDE}x",
    ):
        world.connect(client_id)(1.0)
    async with serve(world.server()) as ask:
        status = (await ask("GET", "/v1/status?by=client")).json
    out = StringIO()
    Console(file=out, width=200).print(draw_view(status, "name", 200))
    assert not set(out.getvalue()) & set("\x1b\x07\r\N{RIGHT-TO-LEFT OVERRIDE}")
    assert "[bold red]x[/]" in out.getvalue()


@pytest.mark.parametrize("width", [80, 120, 200])
async def test_the_longest_client_id_takes_few_lines(world: AdminWorld, width: int):
    send = world.connect("x" * 249, user="alice")
    send(600 * MIB)
    send(MIB, PRODUCER)
    async with running(world.server()) as address:
        out = await run_once(address, width)
    assert max(map(len, out.splitlines())) <= width
    assert "1 of 1 clients under a quota" in out
    assert "throttled 1 " in " ".join(out.split())
    assert len(out.splitlines()) <= 10
    assert "…" in out


def test_orders():
    quotas = [
        {"group": "a", "entity": "a", "quota": "q", "held_s": 1.0, "rate": 9, "bound": 10},
        {"group": "b", "entity": "b", "quota": "q", "held_s": 0.0, "rate": 0, "bound": 10},
        {"group": "b", "entity": "b", "quota": "r", "held_s": 5.0, "rate": 1, "bound": 10},
        {"group": "c", "entity": "c", "quota": "q", "held_s": 0.0, "rate": 20, "bound": 10},
    ]
    orders = {
        order: "".join(
            each["entity"] + each["quota"] for one in sorted_clients(quotas, order) for each in one
        )
        for order in ("held", "name", "rate")
    }
    assert orders == {"held": "bqbraqcq", "name": "aqbqbrcq", "rate": "cqaqbqbr"}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "bytes_per_second", "0 B/s"),
        (1023, "bytes_per_second", "1023 B/s"),
        (1536, "bytes_per_second", "1.5 KiB/s"),
        (10 * 2**20, "bytes_per_second", "10 MiB/s"),
        (2**43, "bytes_per_second", "8192 GiB/s"),
        (12.34, "percent", "12.3 %"),
    ],
)
def test_rates(value: float, unit: str, text: str):
    assert rate_text(value, unit) == text


def test_printable():
    assert printable("ключ-1\x00\n\u200b") == r"ключ-1\x00\n\u200b"


async def test_clients_without_a_bound_are_named(unruled: AdminWorld):
    for number in range(11):
        unruled.connect("et\u200bl" if number == 0 else f"c{number}" if number > 1 else None)
    async with running(unruled.server()) as address:
        for width in (60, 200):
            out = await run_once(address, width)
            assert max(map(len, out.splitlines())) <= width
        assert (
            r"0 of 0 clients under a quota; 11 without a bound: et\u200bl, (no client id), " in out
        )
        assert "c9, ...\n" in out
