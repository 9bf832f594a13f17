"""Who the client of one connection is, by its first client id and its login; its requests."""

from collections.abc import Callable
from functools import cached_property

from proxy.cluster.upstream import Address
from proxy.quota.client_quotas import ClientQuotas
from proxy.quota.connection_quotas import CountedConnection
from proxy.quota.entities import ClientIdentity, QuotaKind, shortened_client_id
from proxy.quota.gate import FetchSizes
from proxy.quota.meters import ThrottleDecision
from proxy.relay.listener import ClientOrigin
from proxy.relay.services import Services
from proxy.relay.steering import MemberAddresses, Visit
from proxy.relay.topic_traffic import TopicQuotas
from proxy.wire.apis import API_VERSIONS, api_of
from proxy.wire.sasl import SaslExchange


class ClientSession:
    """The client of one connection: its quotas, its owner, and who sees its messages."""

    __slots__ = (
        *("_began_alone", "_generation", "_services", "_steering", "_topics"),
        *("fetch_sizes", "has_asked", "identity", "interceptor", "lacks_fallback"),
        *("origin", "owner", "quotas", "usage"),
    )

    def __init__(self, services: Services, identity: ClientIdentity, origin: ClientOrigin) -> None:
        self.identity = identity
        self.quotas: ClientQuotas = services.quotas.client(identity, origin.ip)
        self.interceptor = services.interceptor(identity, origin.node_id)
        self.owner: MemberAddresses | None = None
        """The member that owns the client, if it is another one."""
        self.lacks_fallback = self._began_alone = False
        """Whether there is a fallback that the client may not know, as it came before that."""
        self.origin, self._services, self._steering = origin, services, services.steering
        self._generation: int | None = None
        self.follow_owner()
        self.fetch_sizes = FetchSizes()
        self.has_asked = False
        """Whether a request that costs a broker's time was let through, or is about to be."""
        self._topics: TopicQuotas | None = None
        services.clients.connected(identity)
        self.usage = services.clients.usage.get(identity)
        """What is recorded of the client beside its bytes, None: nothing."""

    @property
    def topics(self) -> TopicQuotas:
        """What it reads and writes of topics; to be asked where rules name any."""
        if self._topics is None:
            walks = self._services.instruments.topic_walks_total
            self._topics = TopicQuotas(self.quotas, self._services.topic_names, walks)
        return self._topics

    def follow_owner(self) -> None:
        """Look up who owns the client, if that may have changed."""
        steering = self._steering
        if steering is None or steering.generation == self._generation:
            return
        if self._generation is None:
            self._began_alone = self.fallback() is None
        self._generation = steering.generation
        self.lacks_fallback = self._began_alone and self.fallback() is not None
        self.owner = steering.owner_of(self.identity)

    def charge(self, kind: QuotaKind, value: float, now_ms: float) -> ThrottleDecision | None:
        """Record traffic, as `ClientQuotas.charge`; of another member's client there, too."""
        quotas, steering = self.quotas, self._steering
        if steering is None or self.owner is None:
            return quotas.charge(kind, value, now_ms)
        quotas.pace_immediately(kind, now_ms)
        charge = quotas.charge(kind, value, now_ms)
        if not kind.is_time:
            self._services.instruments.visits_bytes_total.inc(value)
        if quotas.has(kind):
            steering.visited(Visit(quotas.identity, self.origin.ip, kind, value))
        return charge

    def address_of(self, node_id: int) -> Address | None:
        """Return what the client is told for a broker where its owner is another member.

        None: what all clients are told here. So is a client whose owner has no port for the broker
        yet; it is served here.
        """
        self.follow_owner()
        return None if self.owner is None else self.owner.address_of(self.origin.name, node_id)

    @property
    def must_go(self) -> bool:
        """Whether another member owns the client, and can be reached in this one's place."""
        owner, origin = self.owner, self.origin
        if owner is None:
            return False
        return origin.node_id is None or owner.address_of(origin.name, origin.node_id) is not None

    @property
    def has_moved(self) -> bool:
        """Whether the client got another owner just now."""
        return self._steering is not None and self._steering.has_moved(self.identity)

    def fallback(self) -> Address | None:
        """Return where the client is to go when its owner dies; None when there is no such place.

        For clients that know no other addresses than those of their last metadata.
        """
        steering = self._steering
        member = steering.fallback_of(self.identity) if steering is not None else None
        return member.bootstrap_of(self.origin.name) if member is not None else None

    @property
    def is_at_fallback(self) -> bool:
        """Whether the client may take this for the fallback broker: that is a bootstrap port."""
        return self.origin.node_id is None and self.fallback() is not None

    def close(self) -> None:
        """Release the quotas and counters."""
        self.quotas.close()
        self.interceptor.close()
        self._services.clients.disconnected(self.identity)


class ClientIdentityTracker:
    """Follows what a connection says of its client; `user`: that its TLS certificate names."""

    def __init__(self, services: Services, origin: ClientOrigin, user: str | None) -> None:
        self._services = services
        self._origin = origin
        self._user = user
        self._client_id: str | None = None
        self._is_warned = False
        self.current: ClientSession | None = None
        """None before the first request, and between a login and the next one."""
        self.slot: CountedConnection | None = None
        """Among the client's connections; None while it is not known whose this is."""

    def enter(
        self, api_key: int, client_id: str | None, now_ms: float, give_way: Callable[[], bool]
    ) -> float:
        """Give the connection a place among its client's; return for how many ms it is to wait.

        To be called before a request begins a session. Until a login that decides whose it is,
        it has none. For `give_way` see CountedConnection. Raises ConnectionRejected.
        """
        if self.current is not None and (self._client_id or client_id == self._client_id):
            return 0.0
        client_id = self._client_id or client_id
        identity = ClientIdentity(self._origin.name, self._user, shortened_client_id(client_id))
        if self.slot is not None and self.slot.identity == identity:
            return 0.0
        quotas = self._services.connection_quotas
        may_log_in = self._user is None and (api_key == API_VERSIONS or api_of(api_key).is_login)
        if may_log_in and quotas.depends_on_user:
            return 0.0
        self.slot, wait_ms = quotas.enter(identity, self.slot, now_ms, self._origin.ip, give_way)
        return wait_ms

    def session(self, client_id: str | None) -> ClientSession:
        """Return the client's session. The first client id that is not empty counts from then on.

        Kafka's clients use one. With several a client could have a quota for each request.
        """
        session = self.current
        if session is not None:
            if client_id == self._client_id:
                return session
            if self._client_id:
                if not self._is_warned:
                    self._is_warned = True
                    self._services.log.warning(
                        "client id changes within a connection, the first one counts",
                        first=self._client_id,
                        now=shortened_client_id(client_id),
                        reason="client_id",
                        **self._origin.about,
                    )
                return session
            session.close()
        self._client_id = client_id = self._client_id or client_id  # also after a login
        identity = ClientIdentity(self._origin.name, self._user, shortened_client_id(client_id))
        self.current = ClientSession(self._services, identity, self._origin)
        return self.current

    @cached_property
    def sasl(self) -> SaslExchange:
        """What its SASL requests say; made with the first of them."""
        return SaslExchange()

    def login_response(self, api_key: int, version: int, frame: bytes) -> None:
        """Read a SASL response; after the last one the user is known."""
        self.sasl.response(api_key, version, frame)
        principal = self.sasl.principal
        if principal is not None and principal != self._user:
            self._user = principal
            self.close()

    def leave(self) -> None:
        """Close the session, and give the connection's place up."""
        self.close()
        if self.slot is not None:
            self._services.connection_quotas.leave(self.slot)
            self.slot = None

    def close(self) -> None:
        """Close the session; the next request begins another one."""
        if self.current is not None:
            self.current.close()
            self.current = None
