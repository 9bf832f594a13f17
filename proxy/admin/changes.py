"""Makes a change of an operator: records it, logs who made it, and refuses what cannot be made."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from structlog import get_logger

from proxy.admin.audit import AuditLog
from proxy.admin.port.guard import current_author
from proxy.admin.replies import ApiError
from proxy.state import StateError

_log = get_logger(__name__)


@asynccontextmanager
async def audited(
    audit: AuditLog, what: str, get: Callable[[], object], fix: str = ""
) -> AsyncIterator[None]:
    """Record the change that the body makes to what `get` returns; see AuditLog.recording.

    Raises ApiError for the body's ValueError, which `fix` mends, and where it cannot be stored.
    """
    try:
        async with audit.recording(current_author(), what, get):
            yield
    except ValueError as error:
        raise ApiError(400, str(error), fix) from None
    except StateError as error:
        raise ApiError(503, error.what, error.fix) from error


def log_change(event: str, *, level: str = "info", **about: object) -> None:
    """Log a change, and who has made it."""
    who = current_author()
    getattr(_log, level)(event, **about, who=who.name, remote=who.address)
