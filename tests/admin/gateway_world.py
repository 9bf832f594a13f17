"""Real admin servers on UNIX sockets, with real quotas behind each, and a real gateway before."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from admin_world import AdminWorld, Answer, Ask, NoQueries
from prometheus_client import CollectorRegistry
from yarl import URL

from metrics import MemberInstruments
from proxy.admin.gateway.gateway import Gateway
from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.admin.port.access import Access
from proxy.admin.server import AdminServer
from proxy.progress.query_scope import QueryScope
from proxy.progress.report import Refusal, ReportRefused


class Reported(NoQueries):
    """Keeps the reports that came to one member."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    async def accept(self, raw: bytes, scope: QueryScope) -> Mapping[str, object]:
        del scope
        if b"{" not in raw:
            raise ReportRefused(Refusal.MALFORMED, "not a report", "send one")
        self.taken.append(raw)
        return {"accepted": True, "rate": None, "bound": None, "lost_reports": 0, "advice": []}


class GatewayWorld:
    """Some members and their gateway."""

    def __init__(
        self,
        names: Sequence[str] = ("0", "1", "2"),
        make_world: Callable[[], AdminWorld] = AdminWorld,
    ) -> None:
        self.worlds = {name: make_world() for name in names}
        self.reports = {name: Reported() for name in names}
        self.servers: dict[str, AdminServer] = {}
        self.endpoints: dict[str, MemberEndpoint] = {}
        self.owners: dict[str, str | None] = {}
        """By client id; the first member owns all others."""
        self.first = names[0]
        self.gateway: Gateway

    def owner_of(self, client_id: str) -> str | None:
        return self.owners.get(client_id, self.first)

    @asynccontextmanager
    async def running(
        self,
        access: Access | None = None,
        servers: Mapping[str, Mapping[str, Any]] | None = None,
        **changes: Any,
    ) -> AsyncIterator[str]:
        """Run all; gives the gateway's address. `servers`: what is different at one."""
        with tempfile.TemporaryDirectory() as folder:
            async with AsyncExitStack() as stack:
                for name, world in self.worlds.items():
                    more = {"reports": self.reports[name], "member": name} | dict(
                        (servers or {}).get(name, {})
                    )
                    server = self.servers[name] = world.server(**more)
                    path = Path(folder) / f"{name.replace('/', '-')}.sock"
                    await server.start_at(path)
                    stack.push_async_callback(server.stop)
                    self.endpoints[name] = MemberEndpoint(name, path)
                self.gateway = Gateway(
                    "127.0.0.1",
                    0,
                    members=lambda: list(self.endpoints.values()),
                    owner_of=self.owner_of,
                    first=lambda: self.first,
                    metrics=MemberInstruments(CollectorRegistry()),
                    access=access or Access(),
                    **changes,
                )
                await self.gateway.start()
                stack.push_async_callback(self.gateway.stop)
                yield f"http://127.0.0.1:{self.gateway.port}"

    @asynccontextmanager
    async def asked(self, *, access: Access | None = None, **how: Any) -> AsyncIterator[Ask]:
        """Run all; gives `ask(method, path, **what aiohttp takes)`."""
        async with self.running(access, **how) as address, aiohttp.ClientSession() as session:

            async def ask(method: str, path: str, **how: Any) -> Answer:
                url = URL(f"{address}{path}", encoded=True)
                async with session.request(method, url, **how) as response:
                    text = await response.text()
                    is_json = response.content_type == "application/json" and text
                    body = await response.json() if is_json else None
                    return Answer(response.status, response.headers, text, body)

            yield ask

    async def kill(self, name: str) -> None:
        """Let a member end while the others go on."""
        await self.servers[name].stop()

    def mark_dead(self, name: str) -> None:
        """Have it known that a member does not run."""
        self.endpoints[name] = replace(self.endpoints[name], alive=False)


def names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the members that rows are of."""
    return [row["member"] for row in rows]
