"""What the files say that a configuration names: certificates with their keys, passwords, tokens.

A name that ends in `_file` marks such a key of the configuration, in whatever section it is.
"""

import hashlib
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from proxy.cluster.dial import upstream_context
from proxy.config import files
from proxy.config.models import ClusterTls, Config, ServerTls
from proxy.quota.fields import ConfigSection
from proxy.relay.tls import not_after, server_context

NAME_ENDING = "_file"

PUBLIC_FILES = frozenset({"cert_file", "ca_file"})
"""Keys whose files hold no secret."""

AnyTls = ClusterTls | ServerTls

NO_LISTENER = ""
"""In the place of a listener's name, of what is for brokers, or for operators."""

ALL_RIGHTS = "admin"
"""Name of the token in `admin.token_file`."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A file of certificates that is in use."""

    role: str
    """`server`: shown to clients; `client`: shown to brokers; `admin`: shown to operators;
    `client_ca`, `broker_ca`, `admin_ca`: by which those are checked."""
    listener: str
    """Its name, or NO_LISTENER."""
    section: str
    """Where the configuration names it, such as `cluster.tls`."""
    file: str
    not_after_s: float
    """When the first of a chain expires, or the last of the authorities; seconds of the epoch."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """All of them as they were at one moment; each fits its key."""

    listeners: Mapping[str, ssl.SSLContext] = field(repr=False)
    """The TLS of the listeners that have it, by name."""
    upstream: ssl.SSLContext | None = field(repr=False)
    """That towards the brokers."""
    password: str | None = field(repr=False)
    """With which the proxy itself logs in to them."""
    tokens: Mapping[str, str] = field(repr=False)
    """Those of the admin server, by name."""
    hash_key: bytes | None = field(repr=False)
    """With which names in usage records are hashed."""
    admin: ssl.SSLContext | None = field(repr=False)
    """The TLS of the admin server."""
    peers: ssl.SSLContext | None = field(repr=False)
    """That of a tier's members towards each other's admin servers."""
    certificates: tuple[Certificate, ...]
    tls_digest: bytes = field(repr=False)
    """Of the files behind the TLS contexts: with the same content these need not be replaced."""


def named_files(section: ConfigSection, but: Collection[str] = ()) -> Iterator[Path]:
    """Yield the files that a section, or one within it, names by other keys than these."""
    for name, value in section:
        if isinstance(value, Path) and name.endswith(NAME_ENDING) and name not in but:
            yield value
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, ConfigSection):
                yield from named_files(each, but)


def read_secrets(config: Config) -> Secrets:
    """Read the files as they are now. Raises BadValueError: one is bad, or a key does not fit."""
    sasl, upstream, admin = config.cluster.sasl, config.cluster.tls, config.admin
    servers = {each.name: each.tls for each in config.listeners if each.tls is not None}
    digest = hashlib.sha256()
    for tls in filter(None, (*servers.values(), upstream, admin.tls)):
        for path in named_files(tls):
            digest.update(files.read_bytes(path))
    tokens = {each.name: files.read_token(each.token_file) for each in admin.tokens}
    if admin.token_file is not None:
        tokens[ALL_RIGHTS] = files.read_token(admin.token_file)
    hash_key_file = config.usage.hash_key_file if config.usage is not None else None
    certificates: list[Certificate] = []
    for name, tls in servers.items():
        certificates += _certificates_of(tls, "server", "client_ca", f"listeners {name!r}", name)
    certificates += _certificates_of(upstream, "client", "broker_ca", "cluster.tls")
    certificates += _certificates_of(admin.tls, "admin", "admin_ca", "admin.tls")
    return Secrets(
        listeners={name: _server_context(section) for name, section in servers.items()},
        upstream=(
            upstream_context(upstream.ca_file, upstream.cert_file, upstream.key_file)
            if upstream
            else None
        ),
        password=files.read_password(sasl.password_file) if sasl else None,
        tokens=tokens,
        hash_key=files.read_hash_key(hash_key_file) if hash_key_file else None,
        admin=_server_context(admin.tls) if admin.tls else None,
        peers=_peer_context(admin.tls) if admin.tls and config.tier else None,
        certificates=tuple(certificates),
        tls_digest=digest.digest(),
    )


def _certificates_of(
    tls: AnyTls | None, role: str, authorities: str, section: str, listener: str = NO_LISTENER
) -> Iterator[Certificate]:
    """Yield the certificates of a section of TLS, its own and those of its authorities.

    Raises BadValueError for files that are of no use.
    """
    if tls is None:
        return
    if tls.cert_file is not None and tls.key_file is not None:
        files.check_key_pair(tls.cert_file, tls.key_file)
    if tls.ca_file is not None:
        files.check_certificates(tls.ca_file)
    for each, path, choose in ((role, tls.cert_file, min), (authorities, tls.ca_file, max)):
        if path is not None:
            yield Certificate(each, listener, section, str(path), not_after(path, choose))


def _server_context(tls: ServerTls) -> ssl.SSLContext:
    return server_context(tls.cert_file, tls.key_file, tls.ca_file)


def _peer_context(tls: ServerTls) -> ssl.SSLContext:
    """Return how members know each other at admin ports.

    They trust what the system does, `admin.tls.ca_file`, and the certificate of this one, which
    this one shows.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(tls.ca_file or tls.cert_file)
    context.load_verify_locations(tls.cert_file)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context
