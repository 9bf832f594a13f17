"""A real headless Chromium, driven through its own DevTools protocol."""

import asyncio
import base64
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium found; the status page is tested in one: apt-get install chromium"
START_TIMEOUT_S = 60
WAIT_TIMEOUT_S = 30
ANSWER_TIMEOUT_S = 60
"""How long one answer of the browser may take: a script in it may wait for WAIT_TIMEOUT_S."""
STOP_TIMEOUT_S = 10
POLL_MS = 20
"""Between two looks at a condition in the page: it may be about anything, which tells nobody."""
MAX_MESSAGE_BYTES = 64 << 20
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--lang=en-GB",
    "--remote-debugging-port=0",
)

WIDE = {"width": 1440, "height": 1060}
PHONE = {"width": 360, "height": 800}

CONTRAST = """(() => {
  const light = (color) => {
    const parts = color.match(/[0-9.]+/g).slice(0, 3).map(Number).map((part) => {
      const share = part / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const ground = (node) => {
    const color = getComputedStyle(node).backgroundColor;
    return color === 'rgba(0, 0, 0, 0)' ? ground(node.parentElement) : color;
  };
  return [...document.querySelectorAll('body *')]
    .filter((node) => [...node.childNodes].some((each) => each.nodeType === 3 && each.data.trim()))
    .filter((node) => node.checkVisibility())
    .map((node) => {
      const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.innerText];
    })
    .filter(([ratio]) => ratio < 4.5);
})()"""
"""The texts that do not stand out from their ground by WCAG's 4.5, and by how much they do."""


def text(selector: str) -> str:
    """Return an expression for the text of an element."""
    return f"document.querySelector({selector!r}).innerText"


class Page:
    """One tab. Keeps what it asked for and what it complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._skipped = asyncio.Event()
        self.urls: list[str] = []
        self.complaints: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = len(self._answers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await self._answers[number]

    async def listen(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers[event["id"]]
                if "error" in event:
                    answer.set_exception(RuntimeError(str(event["error"])))
                else:
                    answer.set_result(event["result"])
                continue
            params = event["params"]
            match event["method"]:
                case "Emulation.virtualTimeBudgetExpired":
                    self._skipped.set()
                case "Network.requestWillBeSent":
                    self.urls.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                    self.complaints.append(json.dumps(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    self.complaints.append(json.dumps(params["entry"]))

    async def run(self, script: str) -> Any:
        """Evaluate an expression; promises are awaited."""
        answer = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, condition: str) -> None:
        """Wait until an expression is true."""
        script = (
            "new Promise((resolve, reject) => {"
            f"  const giveUp = setTimeout(() => resolve(false), {WAIT_TIMEOUT_S * 1000});"
            "   const look = () => {"
            f"    if ({condition}) {{ clearTimeout(giveUp); resolve(true); }}"
            f"    else setTimeout(look, {POLL_MS});"
            "   }; look(); })"
        )
        assert await self.run(script), f"never came true: {condition}\n{self.complaints}"

    async def open(self, url: str, shown: str) -> None:
        """Go to a page, and wait until it is there and an expression is true."""
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")
        await self.until(shown)

    async def look(self, *, width: int, height: int, dark: bool = False, scale: float = 1) -> None:
        """Set the size of the window in CSS pixels, and the colours that the reader prefers."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[colours])

    async def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def skip(self, milliseconds: int) -> None:
        """Let so much time pass for the page at once; its clock stands still afterwards."""
        self._skipped.clear()
        await self.send("Emulation.setVirtualTimePolicy", policy="advance", budget=milliseconds)
        async with asyncio.timeout(WAIT_TIMEOUT_S):
            await self._skipped.wait()

    async def shoot(self, path: Path) -> None:
        shot = await self.send("Page.captureScreenshot", format="png")
        _write(path, base64.b64decode(shot["data"]))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@asynccontextmanager
async def chromium() -> AsyncIterator[Page]:
    """Start a browser with a fresh profile, give its first tab, end the browser."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, INSTALL
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "TZ": "UTC"},
        )
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                address = await _debugging_address(process)
            drain = asyncio.create_task(_drain(process))
            async with _tab(address) as page:
                yield page
            drain.cancel()
        finally:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def _debugging_address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = b""
    async for line in process.stderr:
        seen += line
        if b"DevTools listening on ws://" in line:
            return line.split(b"ws://")[1].split(b"/")[0].decode()
    raise AssertionError(f"Chromium did not start:\n{seen.decode()}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65536):
        pass


@asynccontextmanager
async def _tab(address: str) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{address}/json/list") as response:
            tabs = await response.json()
        url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with session.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.send(f"{domain}.enable")
            yield page
            listening.cancel()
