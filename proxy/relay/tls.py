"""TLS contexts of listeners, and what a client's certificate or SNI name says."""

import re
import ssl
from base64 import b64decode
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

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
}

_RFC_2253_SPECIAL = re.compile(r'([,+"\\<>;]|^[ #]|(?<=.) $)')
"""What RFC 2253, section 2.4, wants a backslash before."""


_PEM = re.compile("-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.+?)-----END ", re.DOTALL)
"""All that OpenSSL takes for a certificate; in a trusted one more follows it."""

_CONTEXT_0 = 0xA0
_TIMES = {0x17: "%y%m%d%H%M%S%z", 0x18: "%Y%m%d%H%M%S%z"}
"""Form of a time by its DER tag: UTCTime, whose years are 1950 to 2049, and GeneralizedTime."""

_UTC_TIME, _LAST_UTC_YEAR = 0x17, 2049


def server_context(cert_file: Path, key_file: Path, ca_file: Path | None) -> ssl.SSLContext:
    """Make the context of a listener. With `ca_file` clients must show a certificate of that CA.

    The SNI name that a client asks for is kept on its socket, see `sni_of`.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert_file, key_file)
    if ca_file is not None:
        context.load_verify_locations(ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    context.sni_callback = _keep_sni
    return context


def sni_of(sock: ssl.SSLSocket) -> str | None:
    """Return the server name that this client asked for."""
    return getattr(sock, "requested_name", None)


def principal_of(sock: ssl.SSLSocket) -> str | None:
    """Return the distinguished name of the client's certificate, None without one."""
    certificate = sock.getpeercert()
    return distinguished_name(certificate.get("subject", ())) if certificate else None  # type: ignore[arg-type]


def distinguished_name(subject: tuple[tuple[tuple[str, str], ...], ...]) -> str | None:
    """Write a certificate's subject, which comes root first, as Kafka does (RFC 2253).

    Attributes that the RFC does not name keep OpenSSL's long name, `emailAddress` for one.
    """
    return ",".join("+".join(map(_attribute, names)) for names in reversed(subject)) or None


def _attribute(pair: tuple[str, str]) -> str:
    name, value = pair
    escaped = _RFC_2253_SPECIAL.sub(r"\\\1", value)
    return f"{_SHORT_NAMES.get(name, name)}={escaped}"


def sni_pattern(template: str) -> re.Pattern[str]:
    """Turn `broker-{node_id}.example` into a pattern whose group `node_id` is the number."""
    before, after = template.split("{node_id}")
    return re.compile(re.escape(before) + r"(?P<node_id>\d{1,9})" + re.escape(after), re.IGNORECASE)


def _keep_sni(sock: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
    sock.requested_name = name  # type: ignore[union-attr]


def not_after(cert_file: Path) -> float:
    """Return when a certificate in a PEM file expires, of several the first; seconds of the epoch.

    Raises OSError, or ValueError for a file that holds none.
    """
    blocks = _PEM.findall(cert_file.read_text("latin-1"))
    return min(_not_after(b64decode(block)) for block in blocks)


def _not_after(certificate: bytes) -> float:
    """Return the end of a certificate's validity (RFC 5280, section 4.1)."""
    (_, signed), *_ = _parts(certificate)
    (_, to_be_signed), *_ = _parts(signed)
    parts = [part for part in _parts(to_be_signed) if part[0] != _CONTEXT_0]  # without a version
    _serial_number, _algorithm, _issuer, (_, validity), *_ = parts
    _, (tag, text) = _parts(validity)
    text = text.replace(b"Z", b"+0000")
    time = datetime.strptime(text.decode(), _TIMES[tag])  # noqa: DTZ007 - it has %z
    if tag == _UTC_TIME and time.year > _LAST_UTC_YEAR:  # Python turns over in 1969
        time = time.replace(year=time.year - 100)
    return time.timestamp()


def _parts(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield tag and content of the values of DER that follow each other."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & 0x80:  # so many bytes hold the length
            count = length & 0x7F
            length = int.from_bytes(data[at : at + count])
            at += count
        yield tag, data[at : at + length]
        at += length
