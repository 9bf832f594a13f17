"""Keep which numbers belong together."""


class DisjointSets:
    """Numbers 0 to `count` - 1, each a set of its own until it is joined with others."""

    __slots__ = ("_parents",)

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def find(self, number: int) -> int:
        """Return the number that stands for the set: the smallest one in it."""
        parents = self._parents
        while parents[number] != number:
            parents[number] = number = parents[parents[number]]
        return number

    def join(self, one: int, other: int) -> bool:
        """Make one set of two; return whether they were two."""
        first, second = self.find(one), self.find(other)
        if first == second:
            return False
        self._parents[max(first, second)] = min(first, second)
        return True
