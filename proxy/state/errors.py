"""What can be wrong with the state, in the words that an operator reads."""


class StateError(Exception):
    """State that cannot be read or written; nothing was replaced or given up.

    Attributes:
        what: what is wrong, and where.
        fix: how to mend it.

    """

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}\n    fix: {fix}")
        self.what = what
        self.fix = fix
