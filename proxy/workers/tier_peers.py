"""Makes from a configuration how the other machines of its tier are asked."""

import ssl
from dataclasses import dataclass, field

from proxy.config import Config
from proxy.config.secrets import ALL_RIGHTS, Secrets


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """How a machine shows the others who it is, and knows them."""

    token: str | None = field(repr=False)
    """That of `admin.token_file`, which all have."""
    tls: ssl.SSLContext | None = field(repr=False)
    """None where admin ports have none."""


def peer_access_of(config: Config, secrets: Secrets) -> PeerAccess:
    """Make it.

    The machines trust what the system does, `admin.tls.ca_file`, and the certificate of this one,
    which this one shows.
    """
    tls = None
    if (given := config.admin.tls) is not None:
        tls = ssl.create_default_context()
        tls.load_verify_locations(given.ca_file or given.cert_file)
        tls.load_verify_locations(given.cert_file)
        tls.load_cert_chain(given.cert_file, given.key_file)
    return PeerAccess(secrets.tokens.get(ALL_RIGHTS), tls)
