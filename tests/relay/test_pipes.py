"""The pool of pipes: bounded, and only empty pipes are lent again."""

import os
import resource

import pytest
from relaylab.lab import open_files

from proxy.relay.pipes import PipePool


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
    assert open_files() <= files


def test_no_descriptor_left():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        pool = PipePool(5)
        assert pool.take() is None
        assert pool.open_pipes == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
