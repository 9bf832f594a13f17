"""Which members count as reached where clients are sent to."""

from proxy.cluster.upstream import Address
from proxy.relay.steering import AdvertisedListener, MemberAddresses
from proxy.tier.reachability import SETTLE_S, ReachabilityProbe

MEMBER = MemberAddresses("b/0", {"default": AdvertisedListener("b.proxy.example", 9092)})


class Network:
    """Leads from names to IP addresses; what is not in it is not reached."""

    def __init__(self) -> None:
        self.ips: dict[str, str] = {}
        self.now_s = 0.0
        self.changes = 0
        self.silent: set[str] = set()
        self.probe = ReachabilityProbe(
            lambda: self.silent, self._changed, self.connect, lambda: self.now_s
        )

    async def connect(self, address: Address) -> str:
        host, port = address
        if host not in self.ips:
            raise OSError(f"{host}:{port}: refused")
        return self.ips[host]

    def _changed(self) -> None:
        self.changes += 1

    async def reached_with(self, ip: str | None) -> frozenset[str]:
        """Have the member come back with an IP address; return who is reached then."""
        self.probe.use([])
        self.ips = {} if ip is None else {"b.proxy.example": ip}
        self.probe.use([MEMBER])
        await self.probe.look()
        return self.probe.reached


async def test_a_newcomer_is_reached_at_once():
    network = Network()
    assert await network.reached_with("10.0.0.1") == {"b/0"}
    assert network.changes == 1


async def test_who_is_not_reached_is_tried_again():
    network = Network()
    assert await network.reached_with(None) == frozenset()
    assert network.probe.problems == {"b/0": "b.proxy.example:9092: refused"}
    assert "b/0 (b.proxy.example:9092: refused)" in (network.probe.warning or "")
    network.ips = {"b.proxy.example": "10.0.0.1"}
    await network.probe.look()
    assert (network.probe.reached, network.probe.warning) == ({"b/0"}, None)


async def test_who_comes_back_at_its_address_is_reached_at_once():
    network = Network()
    for _ in range(2):
        assert await network.reached_with("10.0.0.1") == {"b/0"}


async def test_who_comes_back_at_another_address_is_reached_when_resolvers_know_it():
    network = Network()
    await network.reached_with("10.0.0.1")
    assert await network.reached_with("10.0.0.2") == frozenset()
    before = network.changes
    network.now_s = SETTLE_S - 1
    await network.probe.look()
    assert (network.probe.reached, network.changes) == (frozenset(), before)
    network.now_s = SETTLE_S + 1
    await network.probe.look()
    assert (network.probe.reached, network.changes) == ({"b/0"}, before + 1)


async def test_a_silent_member_is_not_judged():
    network = Network()
    network.silent = {"b/0"}
    assert await network.reached_with(None) == frozenset()
    assert network.probe.problems == {}
