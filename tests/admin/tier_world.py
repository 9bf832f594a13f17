"""Members of a tier: a real admin server for each on its own port, with real quotas behind it."""

import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import trustme
from admin_world import AdminWorld, Answer, Ask, NoQueries, start
from tokens import OPEN
from yarl import URL

from metrics.member_names import machine_of
from proxy.admin.peers import members as members_module
from proxy.admin.port.guard import AccessRules
from proxy.admin.server import AdminServer
from proxy.progress.report import RefusalReason, ReportableQueries, ReportRefused
from proxy.quota.entities import ClientIdentity
from proxy.quota.manager import SensorDebt
from proxy.state import Document, Record
from proxy.tier.peer_client import PeerClient, Target

NAMES = ("a/0", "a/1", "b/0", "b/1", "c/0", "c/1")

Of = Callable[[str], Ask]

VisitRows = Sequence[Sequence[Any]]
"""Of visits: listener, user, client id, address, kind and amount."""


class Reported(NoQueries):
    """Keeps the reports that came to one member."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    async def accept(self, raw: bytes, scope: ReportableQueries) -> Mapping[str, object]:
        del scope
        if b"{" not in raw:
            raise ReportRefused(RefusalReason.MALFORMED, "not a report", "send one")
        self.taken.append(raw)
        return {"accepted": True, "rate": None, "bound": None, "lost_reports": 0, "advice": []}


class MemberTier:
    """What one member knows of the tier: what the test says."""

    not_ready: str | None = None
    warning: str | None = None

    def __init__(self, name: str, world: "TierWorld") -> None:
        self.name = name
        self.client = PeerClient()
        self.endpoints = {name: Target(name)}
        self.own_slots: Document = {}
        self._world = world

    def members(self) -> Sequence[Target]:
        return list(self.endpoints.values())

    @property
    def leader(self) -> str:
        return self._world.leader

    def owner_of(self, client_id: str) -> str | None:
        return self._world.owners.get(client_id, self.leader)

    def is_visitor(self, client: ClientIdentity) -> bool:
        return self._world.owners.get(client.client_id or "", self.name) != self.name

    def slots(self) -> Document:
        return self.own_slots

    def document(self) -> Document | None:
        rules = self._world.rules
        if rules is None:
            return None
        machines = [{"name": name, "rules": digest} for name, digest in rules.items()]
        return {"name": "prod", "generation": 7, "machines": machines}

    def overview(self) -> Document:
        return {"name": "prod"}

    def alive(self) -> Document:
        return {"member": self.name}

    async def visited(self, rows: VisitRows) -> VisitRows:
        raise ValueError(f"{rows} are not for {self.name}")

    def lease(self, document: Document) -> Sequence[Sequence[Any]]:
        raise ValueError(f"{document} is not for {self.name}")

    async def keep(self, records: Sequence[Record], debts: Sequence[SensorDebt]) -> None:
        raise AssertionError(f"{records} and {debts} are not for {self.name}")


class TierWorld:
    """The members, by their names."""

    def __init__(
        self,
        names: Sequence[str] = NAMES,
        make_world: Callable[[], AdminWorld] = AdminWorld,
        make_tier: Callable[[str, "TierWorld"], MemberTier] = MemberTier,
    ) -> None:
        self.names = names
        self.worlds = {name: make_world() for name in names}
        self.reports = {name: Reported() for name in names}
        self.tiers = {name: make_tier(name, self) for name in names}
        self.servers: dict[str, AdminServer] = {}
        self.owners: dict[str, str | None] = {}
        """By client id; the leader owns all others."""
        self.leader = names[0]
        self.rules: dict[str, str | None] | None = dict.fromkeys(map(machine_of, names), "d1")
        """Digests by machine; None: no tier is configured."""
        self._client_tls: ssl.SSLContext | None = None

    @asynccontextmanager
    async def running(
        self,
        access: AccessRules = OPEN,
        authority: trustme.CA | None = None,
        servers: Mapping[str, Mapping[str, Any]] | None = None,
        token: str | None = "ops-text",
        timeout_s: float = 5.0,  # a busy machine takes none for silent
        **changes: Any,
    ) -> AsyncIterator[Mapping[str, str]]:
        """Run all; gives their addresses by name. `servers`: what is different at one."""
        server_tls = None
        if authority is not None:
            server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            authority.issue_cert("127.0.0.1").configure_cert(server_tls)
            self._client_tls = ssl.create_default_context()
            authority.configure_trust(self._client_tls)
        scheme = "http" if authority is None else "https"
        async with AsyncExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(members_module, "MEMBER_TIMEOUT_S", timeout_s)
            urls = {}
            for name, world in self.worlds.items():
                arguments = {
                    "reports": self.reports[name],
                    "member": name,
                    "tier": self.tiers[name],
                    "access": access,
                    "tls": server_tls,
                }
                server = world.server(**(arguments | changes | dict((servers or {}).get(name, {}))))
                await start(server)
                stack.push_async_callback(server.stop)
                self.servers[name] = server
                urls[name] = f"{scheme}://127.0.0.1:{server.port}"
            for member in self.tiers.values():
                member.client = PeerClient(token, self._client_tls)
                member.endpoints = {name: Target(name, url) for name, url in urls.items()}
            yield urls

    @asynccontextmanager
    async def asked(self, **how: Any) -> AsyncIterator[Of]:
        """Run all; gives `of(member)(method, path, **what aiohttp takes)`."""
        async with self.running(**how) as urls:
            connector = aiohttp.TCPConnector(ssl=self._client_tls or True)
            async with aiohttp.ClientSession(connector=connector) as session:

                def of(member: str) -> Ask:
                    async def ask(method: str, path: str, **how: Any) -> Answer:
                        url = URL(f"{urls[member]}{path}", encoded=True)
                        async with session.request(method, url, **how) as response:
                            text = (await response.read()).decode(errors="replace")
                            is_json = response.content_type == "application/json" and text
                            body = await response.json() if is_json else None
                            return Answer(response.status, response.headers, text, body)

                    return ask

                yield of

    async def kill(self, name: str) -> None:
        """Let a member end while the others go on; its port refuses connections."""
        await self.servers[name].stop()

    def point(self, name: str, url: str) -> None:
        """Have the others find a member elsewhere."""
        self.change(name, url=url)

    def mark_silent(self, name: str) -> None:
        """Have the others know that a member is silent."""
        self.change(name, alive=False)

    def change(self, name: str, **changes: Any) -> None:
        """Have the others know a member otherwise."""
        for member in self.tiers.values():
            if member.name != name:
                member.endpoints[name] = replace(member.endpoints[name], **changes)


def names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the members that rows are of."""
    return [row["member"] for row in rows]


def members(document: Mapping[str, Any]) -> list[str]:
    """Return the members that a merged document names."""
    return [each["name"] for each in document["members"]]
