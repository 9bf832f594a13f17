"""Three machines of a tier: a real gateway on each, and real admin servers behind each of them."""

import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import trustme
from admin_world import Answer, Ask
from gateway_world import GatewayWorld
from tokens import OPEN
from yarl import URL

from proxy.admin.gateway.member_client import MemberEndpoint
from proxy.admin.gateway.tier_routes import TierRoutes, VisitRows
from proxy.admin.port.access import Access
from proxy.state import Document

MACHINES = ("a", "b", "c")
WORKERS = 2


async def no_visits(_: VisitRows) -> VisitRows:
    return []


class TierWorld:
    """The machines, by their names; `a/0` keeps what concerns all."""

    def __init__(self) -> None:
        self.machines = {
            name: GatewayWorld([f"{name}/{number}" for number in range(WORKERS)])
            for name in MACHINES
        }
        self.owners: dict[str, str | None] = {}
        """By client id; the first member owns all others."""
        self.rules = dict.fromkeys(MACHINES, "d1")
        self.first = "a/0"
        self.urls: dict[str, str] = {}
        self._client_tls: ssl.SSLContext | None = None

    @property
    def first(self) -> str:
        return self._first

    @first.setter
    def first(self, name: str) -> None:
        self._first = name
        for machine in self.machines.values():
            machine.first = name
            machine.owners = self.owners

    def world(self, member: str) -> Any:
        """Return what is behind a member."""
        return self.machines[member.partition("/")[0]].worlds[member]

    def tier(self) -> Document:
        machines = [{"name": name, "rules": rules} for name, rules in self.rules.items()]
        return {"name": "prod", "generation": 7, "machines": machines}

    @asynccontextmanager
    async def running(
        self,
        access: Access = OPEN,
        authority: trustme.CA | None = None,
        servers: Mapping[str, Mapping[str, Any]] | None = None,
        token: str = "ops-text",
        **changes: Any,
    ) -> AsyncIterator[Mapping[str, str]]:
        """Run all; gives the addresses of the gateways by machine."""
        server_tls = None
        if authority is not None:
            server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            authority.issue_cert("127.0.0.1").configure_cert(server_tls)
            self._client_tls = ssl.create_default_context()
            authority.configure_trust(self._client_tls)
        async with AsyncExitStack() as stack:
            for name, machine in self.machines.items():
                arguments = {
                    "tier_routes": TierRoutes(lambda: {}, no_visits, dict),
                    "tier": self.tier,
                    "tls": server_tls,
                    "timeout_s": 1.0,
                } | changes
                running = machine.running(access, servers, **arguments)
                url = await stack.enter_async_context(running)
                self.urls[name] = url.replace("http:", "https:") if authority else url
            for name, machine in self.machines.items():
                for other in reversed([each for each in MACHINES if each != name]):
                    machine.endpoints[other] = MemberEndpoint(
                        other, url=self.urls[other], token=token, tls=self._client_tls
                    )
            yield self.urls

    @asynccontextmanager
    async def asked(self, **how: Any) -> AsyncIterator[Callable[[str], Ask]]:
        """Run all; gives `of(machine)(method, path, **what aiohttp takes)`."""
        async with self.running(**how) as urls:
            connector = aiohttp.TCPConnector(ssl=self._client_tls or True)
            async with aiohttp.ClientSession(connector=connector) as session:

                def of(machine: str) -> Ask:
                    async def ask(method: str, path: str, **how: Any) -> Answer:
                        url = URL(f"{urls[machine]}{path}", encoded=True)
                        async with session.request(method, url, **how) as response:
                            text = (await response.read()).decode(errors="replace")
                            is_json = response.content_type == "application/json" and text
                            body = await response.json() if is_json else None
                            return Answer(response.status, response.headers, text, body)

                    return ask

                yield of

    async def kill(self, machine: str) -> None:
        """Let a machine's gateway end; its port refuses connections."""
        await self.machines[machine].gateway.stop()

    def point(self, machine: str, url: str) -> None:
        """Have the others find a machine elsewhere."""
        self._change(machine, url=url)

    def mark_silent(self, machine: str) -> None:
        """Have the others know that a machine is silent."""
        self._change(machine, alive=False)

    def _change(self, machine: str, **changes: Any) -> None:
        for name, other in self.machines.items():
            if name != machine:
                other.endpoints[machine] = replace(other.endpoints[machine], **changes)
