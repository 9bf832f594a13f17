"""TLS contexts of listeners, and what a client's certificate or SNI name says."""

import re
import ssl
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from cryptography.x509 import load_der_x509_certificate, load_pem_x509_certificates

_SHORT_NAMES = {
    "commonName": "CN",
    "organizationalUnitName": "OU",
    "organizationName": "O",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
    "1.2.840.113549.1.9.1": "emailAddress",
}

_RFC_2253_SPECIAL = re.compile(r'([,+"\\<>;]|^[ #]|(?<=.) $)')
"""What RFC 2253, section 2.4, wants a backslash before."""


_CURVE = "prime256v1"
"""P-256, the one group that each client of TLS has (RFC 8446, 9.1). Of OpenSSL's own a client could
ask for ffdhe8192, which takes 90 ms of CPU time for each hello."""


def server_context(cert_file: Path, key_file: Path, ca_file: Path | None) -> ssl.SSLContext:
    """Make the context of a listener. With `ca_file` clients must show a certificate of that CA.

    The SNI name that a client asks for is kept on its socket, see `sni_of`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_ecdh_curve(_CURVE)
    context.load_cert_chain(cert_file, key_file)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    context.sni_callback = _keep_sni
    return context


def sni_of(sock: ssl.SSLObject) -> str | None:
    """Return the server name that this client asked for."""
    return getattr(sock, "requested_name", None)


def principal_of(sock: ssl.SSLObject) -> str | None:
    """Return the distinguished name of the client's certificate, None without one.

    Raises OSError where it cannot be read.
    """
    try:
        certificate = sock.getpeercert()
    except UnicodeDecodeError:  # it reads all, such as another name with a mail address in Latin-1
        return _subject_of(sock.getpeercert(binary_form=True) or b"")
    return distinguished_name(certificate.get("subject", ())) if certificate else None  # type: ignore[arg-type]


def _subject_of(der: bytes) -> str | None:
    try:
        parts = load_der_x509_certificate(der).subject.rdns
    except ValueError as error:
        raise OSError(f"the subject of the client's certificate: {error}") from None
    return distinguished_name(
        tuple(tuple((each.rfc4514_attribute_name, str(each.value)) for each in p) for p in parts)
    )


def distinguished_name(subject: tuple[tuple[tuple[str, str], ...], ...]) -> str | None:
    """Write a certificate's subject, which comes root first, as Kafka does (RFC 2253).

    Attributes that the RFC does not name keep OpenSSL's long name, `emailAddress` for one.
    """
    return ",".join("+".join(map(_attribute, names)) for names in reversed(subject)) or None


def _attribute(pair: tuple[str, str]) -> str:
    name, value = pair
    escaped = _RFC_2253_SPECIAL.sub(r"\\\1", value)
    return f"{_SHORT_NAMES.get(name, name)}={escaped}"


@cache
def sni_pattern(template: str) -> re.Pattern[str]:
    """Turn `broker-{node_id}.example` into a pattern whose group `node_id` is the number."""
    before, after = template.split("{node_id}")
    return re.compile(re.escape(before) + r"(?P<node_id>\d{1,9})" + re.escape(after), re.IGNORECASE)


def _keep_sni(sock: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
    sock.requested_name = name  # type: ignore[union-attr]


def not_after(file: Path, choose: Callable[[Iterable[float]], float] = min) -> float:
    """Return when the certificates in a PEM file expire: of several the first, or as told.

    In seconds since the epoch. Raises OSError, or ValueError for a file that holds none.
    """
    found = load_pem_x509_certificates(file.read_bytes())
    return choose(each.not_valid_after_utc.timestamp() for each in found)
