"""Files that the configuration names: can they be read, and do they hold what they should."""

import os
import ssl
from pathlib import Path

from pydantic import ValidationInfo

from proxy.quota.values import BadValueError, shown


def read_bytes(path: Path) -> bytes:
    """Read a whole file.

    Raises BadValueError if it does not exist, is a directory, or cannot be read.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise BadValueError(
            f"{shown(str(path))} does not exist", "create it or correct its path"
        ) from None
    except IsADirectoryError:
        raise BadValueError(f"{shown(str(path))} is a directory", "name a file") from None
    except PermissionError:
        raise BadValueError(
            f"{shown(str(path))} may not be read by this user",
            "let the user that runs quota-proxy read it",
        ) from None
    except OSError as error:
        raise BadValueError(
            f"{shown(str(path))} cannot be read: {error.strerror}", "correct its path"
        ) from None


def resolve(value: object, info: ValidationInfo) -> Path:
    """Take a path from the YAML file; a relative one starts at that file's directory.

    The directory is the validation context; without one, paths stay as they are. Raises
    BadValueError if it is not text, or empty.
    """
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise BadValueError(f"{shown(value)} is not a path", "write the path of a file")
    return Path(info.context, value) if isinstance(info.context, Path) else Path(value)


def check_certificates(path: Path) -> Path:
    """Return `path` when it holds at least one certificate in PEM form.

    Raises BadValueError if it cannot be read or holds something else.
    """
    read_bytes(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError):
        raise BadValueError(
            f"{shown(str(path))} holds no certificate in PEM form",
            'name a file with a "-----BEGIN CERTIFICATE-----" block',
        ) from None
    return path


def check_private_key(path: Path) -> Path:
    """Return `path` when it looks like an unencrypted private key in PEM form.

    Whether the key is sound shows only together with its certificate: see `check_pair`. Raises
    BadValueError if it cannot be read, holds something else, or needs a passphrase.
    """
    content = read_bytes(path)
    if b"PRIVATE KEY-----" not in content:
        raise BadValueError(
            f"{shown(str(path))} holds no private key in PEM form",
            'name a file with a "-----BEGIN PRIVATE KEY-----" block',
        )
    if b"ENCRYPTED" in content:
        raise BadValueError(
            f"{shown(str(path))} is protected by a passphrase",
            "store the key without one and let only the user of quota-proxy read it",
        )
    return path


def check_pair(cert_file: Path, key_file: Path) -> None:
    """Check that a key belongs to a certificate.

    Raises BadValueError if it does not, or the key is damaged.
    """
    try:
        # A passphrase is given so that OpenSSL never asks for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadValueError(
                f"{shown(str(key_file))} does not belong to the certificate in "
                f"{shown(str(cert_file))}",
                "name the key that this certificate was made with",
            ) from None
        reason = f": {error.reason}" if error.reason else ""
        raise BadValueError(
            f"{shown(str(key_file))} cannot be used with {shown(str(cert_file))}{reason}",
            "make the certificate and its key anew",
        ) from None


def check_token(path: Path) -> Path:
    """Return `path` when it holds a token.

    Raises BadValueError if it cannot be read or is empty.
    """
    if not read_bytes(path).strip():
        raise BadValueError(f"{shown(str(path))} is empty", "put the token into it, on one line")
    return path


def check_password(path: Path) -> Path:
    """Return `path` when it holds a password, on one line.

    Raises BadValueError if it cannot be read, is empty, or holds something else.
    """
    read_password(path)
    return path


def read_password(path: Path) -> str:
    """Return the password in a file: all of it but the end of its line, if it has one.

    Raises BadValueError if it cannot be read, is empty, or holds something else.
    """
    try:
        password = read_bytes(path).decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise BadValueError(f"{shown(str(path))} is not UTF-8", "save the file as UTF-8") from None
    if not password:
        raise BadValueError(f"{shown(str(path))} is empty", "put the password into it, on one line")
    if not password.isprintable():
        raise BadValueError(
            f"{shown(str(path))} holds more than a password",
            "leave one line in it, without control characters",
        )
    return password


def check_database(path: Path) -> None:
    """Check that a database at `path` can be opened, or made when it does not exist.

    Raises BadValueError if it is a directory, its directory does not exist, or may not be written
    to.
    """
    try:
        if path.is_dir():
            raise BadValueError(f"{shown(str(path))} is a directory", "name a file")
        if not path.parent.is_dir():
            raise BadValueError(
                f"the directory {shown(str(path.parent))} does not exist",
                "create it or correct the path",
            )
        # SQLite writes its journal beside the database, so the directory matters as well.
        needed = [path.parent, path] if path.exists() else [path.parent]
        writable = all(os.access(place, os.W_OK) for place in needed)
    except OSError:  # a directory on the way may not even be searched
        writable = False
    if not writable:
        raise BadValueError(
            f"{shown(str(path))} may not be written by this user",
            "name a path in a directory that quota-proxy may write to",
        )
