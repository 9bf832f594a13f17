"""Read when the certificates expire that a configuration names."""

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from proxy.config.models import ClusterTls, Config, ListenerTls

SEQUENCE, UTC_TIME, VERSION = 0x30, 0x17, 0xA0  # tags of ASN.1
LONG_FORM, LENGTH_MASK = 0x80, 0x7F
"""A length above 127 is that of the length itself, with the highest bit set."""

FIRST_SHORT_YEAR = 50  # a year of two digits lies between 1950 and 2049 (RFC 5280, 4.1.2.5.1)

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class CertificateExpiry(NamedTuple):
    """A file with certificates, and when it is of no more use."""

    role: str
    """`server`: shown to clients; `client`: shown to brokers; `client_ca`, `broker_ca`: by which
    those are checked."""
    listener: str
    """Empty for those of the cluster."""
    not_after_s: float
    """In seconds since the epoch."""


def certificate_expiries(config: Config) -> Iterator[CertificateExpiry]:
    """Yield all files with certificates that can be read.

    A chain expires with the first of its certificates, a set of authorities with the last one.
    """
    cluster = config.cluster.tls
    if cluster is not None:
        yield from _expiries("client", "broker_ca", "", cluster)
    for listener in config.listeners:
        if listener.tls is not None:
            yield from _expiries("server", "client_ca", listener.name, listener.tls)


def _expiries(
    own: str, authorities: str, listener: str, tls: ClusterTls | ListenerTls
) -> Iterator[CertificateExpiry]:
    for role, path, choose in ((own, tls.cert_file, min), (authorities, tls.ca_file, max)):
        times_s = list(_file_times(path)) if path is not None else []
        if times_s:
            yield CertificateExpiry(role, listener, choose(times_s))


def _file_times(path: Path) -> Iterator[float]:
    try:
        text = path.read_text("latin-1")
    except OSError:
        return
    for pem in _PEM.findall(text):
        try:
            yield not_after_s(ssl.PEM_cert_to_DER_cert(pem))
        except (ValueError, IndexError):  # OpenSSL has read it, so the others matter
            continue


def not_after_s(certificate: bytes) -> float:
    """Return when a certificate in DER form expires, in seconds since the epoch.

    Raises ValueError or IndexError for bytes that are none.
    """
    _, at, _ = _element(certificate, 0)
    _, at, _ = _element(certificate, at)  # what is signed
    tag, _, end = _element(certificate, at)
    if tag == VERSION:
        at = end
    for _ in ("serial number", "algorithm", "issuer"):
        _, _, at = _element(certificate, at)
    tag, at, _ = _element(certificate, at)
    if tag != SEQUENCE:
        raise ValueError("no validity where it should be")
    _, _, at = _element(certificate, at)  # not before
    tag, at, end = _element(certificate, at)
    text = certificate[at:end].decode("ascii")
    if tag == UTC_TIME:
        text = f"{19 if int(text[:2]) >= FIRST_SHORT_YEAR else 20}{text}"
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the element at this place, where its content begins, and where it ends."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length & LONG_FORM:
        size = length & LENGTH_MASK
        length, begin = int.from_bytes(der[begin : begin + size], "big"), begin + size
    return tag, begin, begin + length
