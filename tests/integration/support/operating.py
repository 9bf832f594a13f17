"""What an operator does: run a command, ask and change a proxy over HTTP, write its file anew."""

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import yaml
from support.forked import ForkedCommand
from support.proxy_process import WAIT_S, ProxyProcess, until
from support.raw import RawClient, fetch

COMMAND_TIMEOUT_S = 300


def quota_proxy(*arguments: object) -> tuple[int, str, str]:
    """Run a command that ends; give exit code, output and errors, without any traceback in them."""
    with TemporaryFile("w+") as output, TemporaryFile("w+") as errors:
        command = ForkedCommand([*map(str, arguments)], output.fileno(), errors.fileno())
        try:
            code = command.wait(COMMAND_TIMEOUT_S)
        finally:
            command.kill()
        output.seek(0)
        errors.seek(0)
        out, err = output.read(), errors.read()
    assert "Traceback" not in out + err, err
    return code, out, err


@contextmanager
def running(process: ProxyProcess) -> Iterator[ProxyProcess]:
    """Run a proxy; it must end in order."""
    try:
        yield process.start()
        process.stop()
    finally:
        process.kill()


@dataclass(frozen=True, slots=True)
class Answer:
    """What the admin server said."""

    status: int
    document: Any


def call(
    process: ProxyProcess,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    token: str | None = None,
) -> Answer:
    """Send a request with a JSON body to the admin server."""
    headers = {} if body is None else {"Content-Type": "application/json"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(
        f"{process.admin_url}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers=headers,
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as response:
            return Answer(response.status, json.load(response))
    except urllib.error.HTTPError as error:
        return Answer(error.code, json.load(error))


def write(process: ProxyProcess, config: dict[str, Any] | str) -> None:
    """Put another configuration in the place of the proxy's file, at once as editors do."""
    text = config if isinstance(config, str) else yaml.safe_dump(config)
    new = process.config_file.with_suffix(".new")
    new.write_text(text)
    new.replace(process.config_file)


def hang_up(process: ProxyProcess) -> None:
    """Send SIGHUP."""
    os.kill(process.pid, signal.SIGHUP)


def reloads(process: ProxyProcess) -> dict[str, float]:
    """Give the counted reloads by result."""
    metrics = process.metrics()
    return {
        result: metrics.value("config_reloads_total", result=result)
        for result in metrics.labels("config_reloads_total", "result")
    }


def until_reloads(process: ProxyProcess, *, ok: int, failed: int) -> None:
    """Wait until so many reloads are counted, and require that they came out so.

    What a reload changes is in force a little before it is counted.
    """
    process.until_counts("config_reloads_total", ok + failed)
    assert reloads(process) == {"ok": ok, "failed": failed}


def until_bound(
    process: ProxyProcess, client: RawClient, topic: str, bound: float | None, timeout_s: float
) -> None:
    """Fetch until the proxy holds this client to a bound; None: to none."""
    entity = f"client-id={client.client_id}"

    def asked() -> bool:
        client.ask(fetch(12, topic))
        listed = json.loads(process.get("/v1/clients")[1])["clients"]
        bounds = [row["bound"] for row in listed if row["entity"] == entity]
        return bounds == ([] if bound is None else [bound])

    until(asked, f"{entity} is held to {bound}", timeout_s)
