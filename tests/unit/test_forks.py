"""A member that the system has no room for leaves nothing behind, and the launcher as it was."""

import errno
import os
import signal

import pytest

from proxy.launcher.worker import SIGNALS, WorkerError, WorkerHandle


async def test_a_fork_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fail)
    worker = WorkerHandle(0)
    try:
        with pytest.raises(WorkerError, match="worker 0 cannot be forked: Resource temporarily"):
            await worker.fork(lambda channel: len(channel.recv(1)), ())
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    assert blocked.isdisjoint(SIGNALS)
    assert (worker.pid, worker.channel, worker.ended.is_set()) == (None, None, True)
