"""What cannot be done, for people: what is wrong, where, and how to mend it."""

import errno


class ProxyError(Exception):
    """Ends a command that does not catch it, which says no more than this."""

    is_bad_input = False
    """Whether what was given to the command is the mistake."""

    def __init__(self, what: str, fix: str = "") -> None:
        """`fix` is empty where `what` says it, too."""
        super().__init__(f"{what}\n    fix: {fix}" if fix else what)
        self.what, self.fix = what, fix


def os_error_fix(error: BaseException | None, otherwise: str) -> str:
    """Return how to mend what the system has refused."""
    is_full = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
    return "raise the limit of open files (ulimit -Hn, LimitNOFILE=)" if is_full else otherwise
