"""What the demo says of a child process that does not end, and of one that ends too soon."""

from pathlib import Path

import pytest

from examples.demo import DemoError
from examples.demo.children import Child

ENDS_AT_ONCE = "this"
STAYS = "http.server"
LONG_S = 60.0


def test_the_end_of_a_child_is_waited_for(tmp_path: Path):
    with Child("feed", ENDS_AT_ONCE, (), tmp_path) as child:
        child.await_end(LONG_S)
        assert child.exit_code == 0
        assert "Beautiful is better than ugly." in child.lines()


def test_a_child_that_does_not_end_is_an_error(tmp_path: Path):
    with (
        Child("feed", STAYS, ("--bind", "127.0.0.1", "0"), tmp_path) as child,
        pytest.raises(DemoError, match=r"The feed has not ended after 0\.01 s"),
    ):
        child.await_end(0.01)


def test_who_waits_for_a_child_is_told_that_it_has_ended(tmp_path: Path):
    with (
        Child("proxy", ENDS_AT_ONCE, (), tmp_path) as child,
        pytest.raises(DemoError, match=r"(?s)ended by itself \(exit code 0\).*Namespaces are"),
    ):
        child.wait_for(lambda: None, "opened its ports", LONG_S)
