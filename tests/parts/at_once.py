"""Coroutines without an event loop, where nothing in them waits, and what goes in steps."""

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    raise AssertionError("it waits")


def in_one_go(steps: Generator[object, None, T]) -> T:
    """Take all steps and return what they return."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            value: T = done.value
            return value
