"""A real headless Chromium, driven through its own DevTools protocol."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any
from urllib.parse import urljoin

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "no Chromium found; the status page is tested in one: apt-get install chromium"
WAIT_TIMEOUT_S = 120
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
        self._password = ""
        self._sending: set[asyncio.Task[Any]] = set()
        self.asked_for_password = 0
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
                case "Fetch.requestPaused":
                    self._answer("Fetch.continueRequest", params)
                case "Fetch.authRequired":
                    self.asked_for_password += 1
                    given = {"username": "anna", "password": self._password}
                    given["response"] = "ProvideCredentials" if self._password else "CancelAuth"
                    self._answer("Fetch.continueWithAuth", params, authChallengeResponse=given)
                case "Network.requestWillBeSent":
                    self.urls.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(json.dumps(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                    self.complaints.append(json.dumps(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    self.complaints.append(json.dumps(params["entry"]))

    def _answer(self, method: str, event: dict[str, Any], **params: Any) -> None:
        task = asyncio.create_task(self.send(method, requestId=event["requestId"], **params))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def give_password(self, password: str) -> None:
        """Give this password, empty for none, whenever the browser asks for one."""
        self._password = password
        await self.send("Fetch.enable", handleAuthRequests=True)

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


@contextmanager
def chromium() -> Iterator[str]:
    """Start a browser with a fresh profile, give the URL that commands for it go to, end it."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert program is not None, INSTALL
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "TZ": "UTC"},
        ) as process,
    ):
        try:
            assert process.stderr is not None
            url = _debugging_url(process.stderr)
            # Else the browser would stop once the pipe is full.
            drain = Thread(target=deque, args=(process.stderr, 0), daemon=True)
            drain.start()
            yield url
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        drain.join()


def _debugging_url(said: IO[bytes]) -> str:
    seen = []
    for line in said:
        seen.append(line.decode())
        _, found, url = seen[-1].partition("DevTools listening on ")
        if found:
            return url.strip()
    raise AssertionError(f"Chromium did not start:\n{''.join(seen)}")


@asynccontextmanager
async def fresh_tab(browser_url: str) -> AsyncIterator[Page]:
    """Give a tab that shares nothing with others of the browser: cookies, caches, storage."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())

        async def connect(url: str) -> Page:
            socket = await stack.enter_async_context(
                session.ws_connect(url, max_msg_size=MAX_MESSAGE_BYTES)
            )
            page = Page(socket)
            stack.callback(asyncio.create_task(page.listen()).cancel)
            return page

        browser = await connect(browser_url)
        # It goes, with all that is open in it, when this connection does.
        context = await browser.send("Target.createBrowserContext", disposeOnDetach=True)
        target = await browser.send("Target.createTarget", url="about:blank", **context)
        page = await connect(urljoin(browser_url, f"/devtools/page/{target['targetId']}"))
        for domain in ("Page", "Runtime", "Network", "Log"):
            await page.send(f"{domain}.enable")
        yield page
