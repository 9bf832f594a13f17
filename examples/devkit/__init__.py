"""A real Kafka broker inside one command, for the demo and the tests; here: its errors."""

from proxy.release import CheckoutRequiredError


class DevkitError(CheckoutRequiredError):
    """The broker or its parts can't be had: what went wrong, and how the user can mend it."""

    is_bad_input = False

    def __init__(self, what: str, how: str) -> None:
        super().__init__(f"{what}\n{how}")
        self.what = what
        self.how = how


class JavaError(DevkitError):
    """There is no Java, or it is too old."""


class PysparkMissingError(DevkitError):
    """Pyspark, which ships the downloader, is not installed or not whole."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The downloader is missing: {what}.", "Run: pip install 'kafka-quota-proxy[demo]'"
        )


class DownloadError(DevkitError):
    """Jar files could not be fetched."""


class BrokerError(DevkitError):
    """The broker could not be started."""
