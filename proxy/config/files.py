"""Files that the configuration names: each check raises BadValueError for one of no use."""

import os
import select
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from metrics.clock import MS_PER_SECOND
from proxy.quota.values import BadValueError, shown

MAX_FILE_MIB = 4
"""The longest file that is read."""
FILE_LIMIT_S = 30.0
"""For a pipe or a device, which may say nothing for good; a person may have to enter a passphrase
for who writes to a pipe."""
MIN_HASH_KEY_CHARS = 16
EXPOSED_MODE = stat.S_IRWXO | stat.S_IWGRP
"""What a file with a secret must not allow; its group may read it, as Kubernetes mounts it so."""


_ABSENT = "does not exist", "create it or correct its path"
_UNREADABLE = {
    FileNotFoundError: _ABSENT,
    NotADirectoryError: _ABSENT,
    IsADirectoryError: ("is a directory", "name a file"),
    PermissionError: ("may not be read by this user", "let the user that runs quota-proxy read it"),
}


def _bad(path: Path, message: str, fix: str) -> BadValueError:
    return BadValueError(f"{shown(str(path))} {message}", fix)


def read_bytes(path: Path) -> bytes:
    """Read a whole file, of `MAX_FILE_MIB` at most."""
    most, content = MAX_FILE_MIB * 2**20, bytearray()
    end_s = monotonic() + FILE_LIMIT_S
    try:
        # Neither who writes to a pipe, nor what that one writes, is waited for for good.
        with open(
            path, "rb", 0, opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK)
        ) as file:
            while len(content) <= most and (piece := file.read(most + 1 - len(content))) != b"":
                content += piece or b""
                if piece is None and not _is_readable(file.fileno(), end_s - monotonic()):
                    fix = "name a file, or have all of it written at once"
                    raise _bad(path, f"does not end within {FILE_LIMIT_S:g} s", fix)
            is_pipe = stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        other = f"cannot be read: {error.strerror}", "correct its path"
        raise _bad(path, *_UNREADABLE.get(type(error), other)) from None
    if is_pipe and not content:
        raise _bad(path, "is a pipe that nobody writes to", "name a file")
    if len(content) > most:
        fix = "make it shorter, or correct its path"
        raise _bad(path, f"has more than {MAX_FILE_MIB} MiB, which is too long", fix)
    return bytes(content)


def _is_readable(fd: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(within_s, 0.0) * MS_PER_SECOND))


def resolve_path(value: object, info: ValidationInfo) -> Path:
    """Return a path; a relative one starts at the directory that is the validation context."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise BadValueError(f"{shown(value)} is not a path", "write the path of a file")
    return Path(info.context, value) if isinstance(info.context, Path) else Path(value)


def _check_reread(path: Path) -> None:
    """Check that OpenSSL, which waits for a pipe for good, finds there what was read."""
    if not path.is_file():
        raise _bad(path, "is no regular file", "copy what it holds into one")


def check_certificates(path: Path) -> None:
    """Check that a file holds at least one certificate in PEM form."""
    read_bytes(path)
    _check_reread(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except OSError:  # an SSLError is one
        fix = 'name a file with a "-----BEGIN CERTIFICATE-----" block'
        raise _bad(path, "holds no certificate in PEM form", fix) from None


def check_private_key(path: Path) -> None:
    """Check that a file looks like an unencrypted private key in PEM form."""
    content = read_bytes(path)
    if b"PRIVATE KEY-----" not in content:
        fix = 'name a file with a "-----BEGIN PRIVATE KEY-----" block'
        raise _bad(path, "holds no private key in PEM form", fix)
    if b"ENCRYPTED" in content:
        fix = "store the key without one and let only the user of quota-proxy read it"
        raise _bad(path, "is protected by a passphrase", fix)
    _check_reread(path)


def check_key_pair(cert_file: Path, key_file: Path) -> None:
    """Check that a key belongs to a certificate and is not damaged."""
    check_private_key(key_file)
    check_certificates(cert_file)
    try:
        # A passphrase is given so that OpenSSL never asks for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        cert = shown(str(cert_file))
        if error.reason == "KEY_VALUES_MISMATCH":
            fix = "name the key that this certificate was made with"
            raise _bad(key_file, f"does not belong to the certificate in {cert}", fix) from None
        reason = f": {error.reason}" if error.reason else ""
        fix = "make the certificate and its key anew"
        raise _bad(key_file, f"cannot be used with {cert}{reason}", fix) from None


def _read_text(path: Path, what: str, clean: Callable[[str], str]) -> str:
    try:
        text = clean(read_bytes(path).decode())
    except UnicodeDecodeError:
        raise _bad(path, "is not UTF-8", "save the file as UTF-8") from None
    if not text:
        raise _bad(path, "is empty", f"put the {what} into it, on one line")
    return text


def read_token(path: Path) -> str:
    """Return the token in a file."""
    return _read_text(path, "token", str.strip)


def read_password(path: Path) -> str:
    """Return the password in a file: all of it but the end of its line, if it has one."""
    password = _read_text(path, "password", lambda text: text.removesuffix("\n").removesuffix("\r"))
    if not password.isprintable():
        fix = "leave one line in it, without control characters"
        raise _bad(path, "holds more than a password", fix)
    return password


def read_hash_key(path: Path) -> bytes:
    """Return the key in a file with which names are hashed."""
    key = _read_text(path, "key", str.strip)
    if len(key) < MIN_HASH_KEY_CHARS:
        fix = "write 32 random characters or more: openssl rand -hex 32"
        raise _bad(path, f"holds a key of less than {MIN_HASH_KEY_CHARS} characters", fix)
    return key.encode()


def find_same_token(paths: Iterable[Path]) -> tuple[str, str] | None:
    """Return two files that hold the same token, if there are."""
    seen: dict[bytes, Path] = {}
    for path in paths:
        other = seen.setdefault(read_bytes(path).strip(), path)
        if other is not path:
            return shown(str(other)), shown(str(path))
    return None


def find_exposed(paths: Iterable[Path]) -> Iterator[str]:
    """Yield a line for each file with a secret that others may read, or its group may write."""
    for path in dict.fromkeys(paths):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            continue
        if mode & EXPOSED_MODE:
            yield (
                f"{path} holds a secret and its mode is {mode:04o}: others may read it, or its "
                f"group may write it; fix: chmod 600 {path}"
            )


def check_database(path: Path) -> None:
    """Check that a database at `path` can be opened, or made when it does not exist."""
    try:
        if path.is_dir():
            raise _bad(path, "is a directory", "name a file")
        if path.exists() and not path.is_file():
            raise _bad(path, "is no regular file", "name one")
        if not path.parent.is_dir():
            fix = "create it or correct the path"
            raise BadValueError(f"the directory {shown(str(path.parent))} does not exist", fix)
        # SQLite writes its journal beside the database, so the directory matters as well.
        needed = [path.parent, path] if path.exists() else [path.parent]
        writable = all(os.access(place, os.W_OK) for place in needed)
    except OSError:  # a directory on the way may not even be searched
        writable = False
    if not writable:
        fix = "name a path in a directory that quota-proxy may write to"
        raise _bad(path, "may not be written by this user", fix)


def _checked_by(check: Callable[[Path], object]) -> AfterValidator:
    def checked(path: Path) -> Path:
        check(path)
        return path

    return AfterValidator(checked)


FilePath = Annotated[Path, BeforeValidator(resolve_path)]
CertificateFile = Annotated[FilePath, _checked_by(check_certificates)]
PasswordFile = Annotated[FilePath, _checked_by(read_password)]
HashKeyFile = Annotated[FilePath, _checked_by(read_hash_key)]
KeyFile = Annotated[FilePath, _checked_by(check_private_key)]
TokenFile = Annotated[FilePath, _checked_by(read_token)]
