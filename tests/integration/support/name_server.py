"""Names under `.test` that mean what a test says, or do not resolve, in a proxy that it starts."""

import json
from pathlib import Path

NAME = "broker.test"

_CHANGES = """
import asyncio
import json
import socket
from pathlib import Path

import uvloop

real = uvloop.Loop.getaddrinfo


async def getaddrinfo(self, host, port, **kinds):
    if not str(host).endswith(".test"):
        return await real(self, host, port, **kinds)
    address = json.loads(Path({file!r}).read_text())
    if address == "silent":
        await asyncio.sleep(600)
    if address == "failing":
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", tuple(address))]


uvloop.Loop.getaddrinfo = getaddrinfo
"""


class NameServer:
    """What all names under `.test` mean. It is started `failing`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "names.json"
        self.fail()
        self.changes = _CHANGES.format(file=str(self._file))
        """Of a ProxyProcess that asks it."""

    def means(self, host: str, port: int) -> None:
        """Let names mean this address."""
        self._put([host, port])

    def fail(self) -> None:
        """Answer that names cannot be resolved now."""
        self._put("failing")

    def fall_silent(self) -> None:
        """Answer nothing."""
        self._put("silent")

    def _put(self, value: object) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(value))
        new.replace(self._file)
