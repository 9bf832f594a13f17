"""Who may do what on the admin port: tokens with rights, and the names that it answers to."""

import hmac
import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from proxy.progress.query_scope import ALL_QUERIES, QueryScope

OPEN_PATHS = ("/healthz", "/readyz", "/metrics")  # what the kubelet and Prometheus ask for


class Right(StrEnum):
    """What a token allows."""

    READ = "read"
    """To read all there is."""
    REPORT = "report"
    """To send reports of batches, as a Spark driver does."""
    QUOTAS = "quotas"
    """To change quotas, and whatever else changes what the proxy does."""


@dataclass(frozen=True, slots=True)
class AdminToken:
    """A secret, and what those may do who show it."""

    name: str
    text: str = field(repr=False)
    rights: Collection[Right] = tuple(Right)
    queries: QueryScope = ALL_QUERIES
    """On which it may report."""

    @property
    def has_all_rights(self) -> bool:
        """Whether it allows whatever can be done."""
        return set(self.rights) >= set(Right) and self.queries == ALL_QUERIES


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what. Without tokens everybody who can connect may do everything."""

    tokens: Sequence[AdminToken] = ()
    read_needs_token: bool = False
    """Whether reading needs a token with the right to."""
    open_paths: Collection[str] = OPEN_PATHS
    """What everybody may read all the same."""
    hosts: Collection[str] = ()
    """Names that the server is asked by, beside addresses and `localhost`; in lower case."""

    def find(self, shown: bytes) -> AdminToken | None:
        """Return the token with this text. How long it takes says nothing of the tokens' texts."""
        found = None
        for token in self.tokens:
            if hmac.compare_digest(shown, token.text.encode()):
                found = token
        return found

    def is_open(self, right: Right, path: str) -> bool:
        """Return whether no token is needed."""
        if right is not Right.READ:
            return not self.tokens
        return not self.read_needs_token or path in self.open_paths

    def knows_host(self, host: str) -> bool:
        """Return whether a `Host` header names this server."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            if name == "localhost" or name in self.hosts:
                return True
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False
