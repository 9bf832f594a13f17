"""Which release of the proxy this is, as pyproject.toml says, and whether it is a checkout."""

from importlib.metadata import PackageNotFoundError, version

PACKAGE = "kafka-quota-proxy"
UNKNOWN_VERSION = "unknown"


class CheckoutError(Exception):
    """A command that only a checkout of the project has cannot go on: this may be none."""

    is_bad_input = True


def _installed() -> str:
    """Return the version of the installed package, UNKNOWN_VERSION if its files were copied."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return UNKNOWN_VERSION


VERSION = _installed()
