"""Which release of the proxy this is, as pyproject.toml says, and whether it is a checkout."""

from importlib.metadata import PackageNotFoundError, version

from proxy.errors import ProxyError

PACKAGE = "kafka-quota-proxy"


class CheckoutRequiredError(ProxyError):
    """A command that only a checkout of the project has cannot go on: this may be none."""

    is_bad_input = True


try:
    VERSION = version(PACKAGE)
except PackageNotFoundError:  # its files were copied
    VERSION = "unknown"
