"""The pool of pipes: bounded, and only empty pipes are lent again."""

import fcntl
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from relaylab.lab import left_open_after, open_files

from proxy.relay.pump import (
    MAX_PIPES,
    MIN_PIPE_BYTES,
    PIPE_BYTES,
    TAKES_WITHOUT_TRYING,
    PipePool,
)

UNUSED_UID = 54_321
"""Of no user: what other processes do does not count towards its share of pipe memory."""

NOT_ROOT = 77
"""The code of a child that cannot become that user."""

SHARE_PAGES = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text())
SHARE_BYTES = SHARE_PAGES * os.sysconf("SC_PAGE_SIZE")


def test_no_more_than_the_limit():
    pool = PipePool(2)
    pipes = [pool.take(), pool.take()]
    assert pool.take() is None
    pool.give_back(pipes[0], empty=True)
    assert pool.take() == pipes[0]
    for pipe in pipes:
        pool.give_back(pipe, empty=True)
    pool.close()


def test_one_with_bytes_inside_is_closed_and_makes_room():
    pool = PipePool(1)
    pipe = pool.take()
    os.write(pipe.write_fd, b"left behind")
    pool.give_back(pipe, empty=False)
    assert pool.open_pipes == 0
    other = pool.take()
    with pytest.raises(BlockingIOError):
        os.read(other.read_fd, 1)
    pool.give_back(other, empty=True)
    pool.close()


def test_close_leaves_nothing_open():
    files = open_files()
    pool = PipePool(5)
    for pipe in [pool.take() for _ in range(5)]:
        pool.give_back(pipe, empty=True)
    assert pool.open_pipes == 5
    pool.close()
    assert pool.open_pipes == 0
    assert not left_open_after(files)


def test_no_descriptor_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        pool = PipePool(5)
        assert pool.take() is None
        assert pool.open_pipes == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def in_a_child_without_privileges(check: Callable[[], None]) -> None:
    """Run a check as an ordinary user, whose pipe memory is bounded."""
    child = os.fork()
    if not child:
        try:
            try:
                os.setgroups([])
                os.setresuid(UNUSED_UID, UNUSED_UID, UNUSED_UID)
            except PermissionError:
                os._exit(NOT_ROOT)
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == NOT_ROOT:
        pytest.skip("only root can become another user")
    assert code == 0


def size_of(pipe) -> int:
    return fcntl.fcntl(pipe.write_fd, fcntl.F_GETPIPE_SZ)


@pytest.mark.skipif(0 < SHARE_BYTES < MAX_PIPES * PIPE_BYTES, reason="pipe memory is set lower")
def test_an_ordinary_user_gets_every_pipe_in_full_size():
    def check() -> None:
        pool = PipePool()
        pipes = [pool.take() for _ in range(MAX_PIPES)]
        assert {size_of(pipe) for pipe in pipes} == {PIPE_BYTES}
        assert pool.take() is None

    in_a_child_without_privileges(check)


@pytest.mark.skipif(not 0 < SHARE_BYTES <= 256 << 20, reason="pipe memory is not bounded")
def test_a_pipe_that_is_too_small_is_not_used():
    def check() -> None:
        pool = PipePool(SHARE_BYTES // MIN_PIPE_BYTES + 1)
        pipes = []
        while (pipe := pool.take()) is not None:
            pipes.append(pipe)
        assert pool.open_pipes == len(pipes) < SHARE_BYTES // MIN_PIPE_BYTES
        assert min(size_of(pipe) for pipe in pipes) >= MIN_PIPE_BYTES

        while pipes:
            pool.give_back(pipes.pop(), empty=False)
        refused = 0
        while pool.take() is None:
            refused += 1
        assert refused == TAKES_WITHOUT_TRYING

    in_a_child_without_privileges(check)
