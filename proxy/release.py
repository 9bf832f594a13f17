"""Which release of the proxy this is; pyproject.toml says it, and nothing else."""

from importlib.metadata import PackageNotFoundError, version

PACKAGE = "kafka-quota-proxy"
UNKNOWN_VERSION = "unknown"


def _installed() -> str:
    """Return the version of the installed package, UNKNOWN_VERSION if its files were copied."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return UNKNOWN_VERSION


VERSION = _installed()
