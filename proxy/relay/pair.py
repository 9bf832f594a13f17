"""What a flow needs of the connection pair that it belongs to."""

from collections import deque
from typing import Protocol

from proxy.relay.exchange import ClientSession, Exchange
from proxy.relay.services import Services
from proxy.wire.frames import RequestHead


class Pair(Protocol):
    """A client connection and its broker connection, as `Connection` joins them."""

    services: Services
    in_flight: deque[Exchange]
    """Requests without a response yet, the oldest first."""

    @property
    def draining(self) -> bool:
        """Whether no further requests are taken; answers are held no more."""

    def advertise(self, node_id: int, host: str, port: int, /) -> tuple[str, int] | None:
        """Return the address that clients of this listener are told for a broker."""

    # Of requests

    def upstream_ready(self) -> bool:
        """Say whether requests can be sent on; start to dial with the first one."""

    def session(self, client_id: str | None) -> ClientSession:
        """Return the client's session; `client_id` is what the request carries."""

    def admits(self, exchange: Exchange) -> bool:
        """Say whether quotas let a request be sent on; if not, it is read again later."""

    def asked(self, exchange: Exchange) -> None:
        """Remember a request that was sent on and will be answered."""

    def unanswered(self, exchange: Exchange) -> None:
        """Handle a Produce request without acknowledgement."""

    def login_asked(self, head: RequestHead, frame: bytes) -> None:
        """Read a SASL request that is sent on."""

    def login_begins(self) -> None:
        """Read no further request until the SASL request that is sent on is answered."""

    # Of responses

    def answered(self) -> None:
        """Go on reading requests if there were too many unanswered ones."""

    def login_answered(self, exchange: Exchange, frame: bytes) -> None:
        """Read a SASL response; after the last one the user is known."""

    def login_ends(self) -> None:
        """Read requests again."""

    def mute(self, due_ms: float, api_key: int) -> None:
        """Do not read requests until `due_ms`."""

    # Of both

    def flow_idle(self) -> None:
        """Handle that one of the flows has nothing to do."""

    def close_client_ended(self, *, mid_frame: bool) -> None:
        """Handle the end of the client's stream."""

    def close_upstream_ended(self) -> None:
        """Handle the end of the broker's stream."""

    def close_failed(self, error: Exception) -> None:
        """Close for an exception of a flow."""
