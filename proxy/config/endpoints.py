"""Network addresses as people write them in YAML: `broker-1:9092`, `[::1]:9092`, `19100-19199`."""

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BeforeValidator

from proxy.quota.values import BadValueError, shown
from proxy.relay.listener import NODE_ID

MAX_PORT: Final = 65535
MACHINE_PLACEHOLDER: Final = "{machine}"
"""Stands for the name of a machine of a tier."""

_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]*[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_MACHINE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?", re.ASCII)
_HOST_AND_PORT = re.compile(
    r"(?:\[(?P<ipv6>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>[0-9]+)", re.ASCII
)
_PORT_RANGE = re.compile(r"(?P<first>[0-9]+)-(?P<last>[0-9]+)", re.ASCII)
_HOST_FIX = "write a name such as broker-1.example, or an address such as 10.0.0.1"
_ENDPOINT_FIX = "write HOST:PORT without a protocol, such as broker-1:9092"
_IPV6_FIX = 'put the IPv6 address in brackets and the whole in quotes: "[{}]:{}"'
_PORTS_FIX = "write FIRST-LAST, such as 19100-19199: broker N gets port FIRST + N"


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host name or address without brackets, and a port; 0 is any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than `localhost` may be reached."""
        address = literal_ip_of(self.host)
        return address is not None and address.is_loopback


@dataclass(frozen=True, slots=True)
class PortRange:
    """The ports for brokers: N listens on `first + N`, up to `last`. Two zeros: on any free one."""

    first: int
    last: int

    def __str__(self) -> str:
        return "0" if self.any_free else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def count(self) -> str:
        """How many ports there are, for people."""
        return "1 port" if len(self) == 1 else f"{len(self)} ports"

    @property
    def any_free(self) -> bool:
        """Whether the system chooses a free port for each broker."""
        return self.first == 0

    def share(self, workers: int, number: int) -> "PortRange":
        """Return the part that a worker has, the `number`th from 0: all have as many.

        There must be a port for each. Of any free ports all may have any.
        """
        if self.any_free:
            return self
        size = len(self) // workers
        first = self.first + number * size
        return PortRange(first, first + size - 1)


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that `host` spells, or None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def literal_ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that `host` spells or surely stands for, or None for another name."""
    return ip_address("127.0.0.1" if host == "localhost" else host)


def parse_endpoint(value: object) -> HostPort:
    """Read `HOST:PORT` with a port from 1 to 65535. Raises BadValueError for anything else."""
    endpoint = parse_bind(value)
    if endpoint.port == 0:
        raise BadValueError(f"{shown(value)} has port 0", "write a port from 1 to 65535")
    return endpoint


def parse_bind(value: object) -> HostPort:
    """Read `HOST:PORT` to listen on; port 0 is any free one. Raises BadValueError for all else."""
    match = _HOST_AND_PORT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        fix = _endpoint_fix(value) if isinstance(value, str) else _ENDPOINT_FIX
        raise BadValueError(f"{shown(value)} is not HOST:PORT", fix)
    port = _port(match["port"])
    if match["ipv6"] is not None:
        if not isinstance(ip_address(match["ipv6"]), ipaddress.IPv6Address):
            message = f"{shown(value)} has no IPv6 address in its brackets"
            raise BadValueError(message, _ENDPOINT_FIX)
        return HostPort(match["ipv6"], port)
    if not match["host"]:
        fix = f"write 0.0.0.0:{port} for every interface"
        raise BadValueError(f"{shown(value)} has no host", fix)
    return HostPort(_checked_host(match["host"]), port)


def _endpoint_fix(text: str) -> str:
    host, _, port = text.rpartition(":")
    for address, its_port in ((host, port), (text, "PORT")):
        if ":" in address and ip_address(address) is not None:
            return _IPV6_FIX.format(address, its_port)
    if ip_address(text) is not None or _HOST_NAME.fullmatch(text):
        return f"add the port: {text}:PORT"
    return _ENDPOINT_FIX


def _port(text: str) -> int:
    # Six digits are already too many; int() of thousands of digits would raise on its own.
    port = int(text[:6])
    if port > MAX_PORT:
        raise BadValueError(f"{shown(text)} is not a port", "write a port from 1 to 65535")
    return port


def _checked_host(host: str) -> str:
    numeric = not host.strip("0123456789.")
    if not _HOST_NAME.fullmatch(host) or (numeric and ip_address(host) is None):
        raise BadValueError(f"{shown(host)} is not a host name or address", _HOST_FIX)
    return host


def parse_advertised_host(value: object) -> str:
    """Read a host that clients can connect to, without a port. Raises BadValueError else."""
    if not isinstance(value, str):
        raise BadValueError(f"{shown(value)} is not a host name or address", "write it as text")
    address = ip_address(value)
    if address is None:
        if _HOST_AND_PORT.fullmatch(value):
            fix = "write the host alone; bind sets the port"
            raise BadValueError(f"{shown(value)} has a port", fix)
        return _checked_host(value)
    if address.is_unspecified:
        message = f"{shown(value)} stands for every interface, clients cannot connect to it"
        fix = "write the name or address under which clients reach this proxy"
        raise BadValueError(message, fix)
    return value


def parse_broker_ports(value: object) -> PortRange:
    """Read `FIRST-LAST` from 1 to 65535, or 0 for any free port. Raises BadValueError else."""
    if value in (0, "0") and value is not False:
        return PortRange(0, 0)
    if isinstance(value, int) and not isinstance(value, bool):
        fix = f"for one broker write {value}-{value}"
        raise BadValueError(f"{value} is one port, not a range", fix)
    match = _PORT_RANGE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise BadValueError(f"{shown(value)} is not a range of ports", _PORTS_FIX)
    first, last = _port(match["first"]), _port(match["last"])
    if first == 0:
        raise BadValueError(f"{shown(value)} starts at port 0", _PORTS_FIX)
    if first > last:
        raise BadValueError(f"{shown(value)} ends before it starts", f"write {last}-{first}")
    return PortRange(first, last)


def parse_machine_host_pattern(value: object) -> str:
    """Read a host as `parse_advertised_host`, in which `{machine}` may stand. Raises as that."""
    if isinstance(value, str) and MACHINE_PLACEHOLDER in value:
        if not _HOST_NAME.fullmatch(value.replace(MACHINE_PLACEHOLDER, "m")):
            fix = f'write a name in quotes, such as "{MACHINE_PLACEHOLDER}.kafka.example"'
            raise BadValueError(f"{shown(value)} does not make a host name", fix)
        return value
    return parse_advertised_host(value)


def parse_machine(value: object) -> str:
    """Read the name of a machine: a label of a host name. Raises BadValueError for all else."""
    if not isinstance(value, str) or not _MACHINE_NAME.fullmatch(value):
        fix = "write up to 63 letters, digits and hyphens, such as proxy-1"
        raise BadValueError(f"{shown(value)} is no name of a machine", fix)
    return value


def parse_sni(value: object) -> str:
    """Read a server name pattern with one `{node_id}`. Raises BadValueError for anything else."""
    fix = f'write a name with {NODE_ID} once, in quotes: "broker-{NODE_ID}.kafka.example"'
    if not isinstance(value, str) or value.count(NODE_ID) != 1:
        raise BadValueError(f"{shown(value)} does not contain {NODE_ID} once", fix)
    if not _HOST_NAME.fullmatch(value.replace(NODE_ID, "0").replace(MACHINE_PLACEHOLDER, "m")):
        raise BadValueError(f"{shown(value)} does not make a host name", fix)
    return value


Endpoint = Annotated[HostPort, BeforeValidator(parse_endpoint)]
Bind = Annotated[HostPort, BeforeValidator(parse_bind)]
AdvertisedHost = Annotated[str, BeforeValidator(parse_machine_host_pattern)]
MachineName = Annotated[str, BeforeValidator(parse_machine)]
BrokerPorts = Annotated[PortRange, BeforeValidator(parse_broker_ports)]
Sni = Annotated[str, BeforeValidator(parse_sni)]
