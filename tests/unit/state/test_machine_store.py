"""The state of a machine through the sockets of its workers: as if each had the store itself."""

import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread

import pytest
from parts.machine import LIMIT_S, Machine

from proxy.state import MemoryStore, Record, SqliteStore, StateError, StateWriter
from proxy.workers.machine_store import MachineStore, SocketTransport, pieces
from proxy.workers.state_frames import STATE_PIECE_BYTES
from proxy.workers.state_server import MAX_UNDER_WAY


@pytest.fixture(params=["memory", "sqlite"])
def machine(request, tmp_path):
    store = MemoryStore() if request.param == "memory" else SqliteStore(tmp_path / "state.db")
    machine = Machine(store)
    yield machine
    machine.close()
    store.close()


def records(count, prefix="n", size=1):
    return [Record.of(f"{prefix}/{number:06}", "x" * size) for number in range(count)]


def test_what_a_worker_writes_is_there_for_all(machine):
    one, two = machine.worker(), machine.worker()
    record = one.put("a/\u00e9\u4e2d", {"b": [1, None]}, 3)
    assert two.get(record.key) == record == machine.store.get(record.key)
    assert two.get("a/other") is None
    assert two.items("a/") == [record]
    assert two.delete(record.key)
    assert not one.delete(record.key)
    assert one.items("") == []


def test_a_key_that_is_deleted_and_written_is_there(machine):
    worker = machine.worker()
    worker.put("a/b", 1)
    assert worker.put_many([Record.of("a/b", 2)], delete=["a/b", "a/c"]) == 1
    assert worker.get("a/b").value == 2


@pytest.mark.parametrize("size", [1, 300])
def test_thousands_of_records_go_in_pieces_and_stay_together(machine, size):
    worker, many = machine.worker(), records(20_000, size=size)
    assert worker.put_many(many) == 0
    assert worker.items("n/") == many
    assert machine.store.items("") == many
    gone = [record.key for record in many]
    assert worker.put_many(records(3, "m"), delete=gone) == len(many)
    assert worker.items("") == records(3, "m")


def test_records_larger_than_a_piece(machine):
    worker, large = machine.worker(), records(3, size=2 * STATE_PIECE_BYTES)
    worker.put_many(large)
    assert worker.items("") == large


def test_pieces_are_bounded_and_complete():
    rows = [(f"{number}", "x" * (STATE_PIECE_BYTES // 3), 1) for number in range(10)]
    cut = list(pieces(rows))
    assert [row for piece in cut for row in piece] == rows
    assert {len(piece) for piece in cut} <= {1, 2}
    assert list(pieces([])) == [[]]


def test_many_threads_of_many_workers(machine):
    workers = [machine.worker() for _ in range(4)]

    def write(number):
        worker, written = workers[number % 4], records(50, f"w{number}", 100)
        for record in written:
            worker.put_many([record])
        return worker.items(f"w{number}/") == written

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(write, range(16)))
    assert len(machine.store.items("")) == 800


def test_reads_in_pieces_interleave(machine):
    worker, many = machine.worker(), records(5_000, size=1_000)
    worker.put_many(many)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(worker.items, ["n/"] * 8))
    assert found == [many] * 8


async def test_a_writer_over_it(machine):
    writer = StateWriter(machine.worker())
    await writer.put_many(records(10))
    await writer.close()
    assert machine.store.items("") == records(10)


class FailingStore(MemoryStore):
    """A store whose disk is full."""

    def put_many(self, records, *, delete=()):  # noqa: ARG002
        raise StateError("the disk is full", "make room")


def test_an_error_travels_with_what_mends_it():
    machine = Machine(FailingStore())
    worker = machine.worker()
    with pytest.raises(StateError) as caught:
        worker.put("a/b", 1)
    assert (caught.value.what, caught.value.fix) == ("the disk is full", "make room")
    assert worker.items("") == []
    machine.close()


def test_nothing_of_a_write_in_pieces_is_there_when_it_fails(tmp_path):
    machine = Machine(SqliteStore(tmp_path / "state.db"))
    worker = machine.worker()
    machine.store.connection.execute(
        "CREATE TRIGGER full BEFORE INSERT ON record "
        "WHEN NEW.key = 'n/004999' BEGIN SELECT RAISE(ABORT, 'full'); END"
    )
    with pytest.raises(StateError):
        worker.put_many(records(5_000, size=1_000))
    assert worker.items("") == []
    machine.close()
    machine.store.close()


def test_a_store_that_is_closed_for_a_take_over_and_another_one():
    machine = Machine()
    worker = machine.worker()
    worker.put("a/b", 1)
    machine.store.close()
    with pytest.raises(StateError):
        worker.get("a/b")
    machine.server.use(MemoryStore())
    assert worker.get("a/b") is None
    worker.put("a/b", 2)
    assert worker.get("a/b").value == 2
    machine.close()


def test_after_close():
    machine = Machine()
    worker = machine.worker()
    worker.close()
    worker.close()
    for call in (worker.get, worker.items, worker.delete):
        with pytest.raises(RuntimeError, match="closed"):
            call("a/b")
    again = MachineStore(machine.ways[0])  # after a take-over that failed
    again.put("a/b", 1)
    machine.close()
    assert len(machine.store.items("")) == 1  # it stays open for others


def test_a_supervisor_that_has_gone():
    here, there = socket.socketpair()
    there.close()
    worker = MachineStore(SocketTransport(here))
    with pytest.raises(StateError, match="cannot be reached"):
        worker.put("a/b", 1)
    worker.close()


class SlowStore(MemoryStore):
    """A store whose disk does not answer before it is told to."""

    def __init__(self):
        super().__init__()
        self.answers = Event()
        self.answers.set()

    def get(self, key):
        assert self.answers.wait(LIMIT_S)
        return super().get(key)


def test_an_answer_that_is_late_is_not_taken_for_that_of_another_call():
    machine = Machine(SlowStore())
    worker = machine.worker(timeout_s=0.5)
    worker.put_many([Record.of("a/b", 1), Record.of("a/c", 2)])
    machine.store.answers.clear()
    with pytest.raises(StateError, match=r"did not answer in 0.5 s \(get\)"):
        worker.get("a/b")
    machine.store.answers.set()
    assert worker.get("a/c").value == 2
    machine.close()


def test_more_reads_than_are_kept():
    machine = Machine()
    worker = machine.worker()
    worker.put_many(records(3_000, size=1_000))
    first = worker._call("items", prefix="")
    for _ in range(MAX_UNDER_WAY):
        worker._call("items", prefix="")
    with pytest.raises(StateError, match="under way"):
        worker._call("more", reading=first["reading"])
    machine.close()


WORKER = """
import socket, sys
from proxy.state import Record
from proxy.workers.machine_store import MachineStore, SocketTransport
store = MachineStore(SocketTransport(socket.socket(fileno=int(sys.argv[1]))))
name = sys.argv[2]
for number in range(100):
    store.put_many([Record.of(f"{name}/{number}", number)])
    store.put_many([Record.of("both/last", name)])
assert len(store.items(f"{name}/")) == 100
"""


def test_two_processes_over_one_file(tmp_path):
    machine = Machine(SqliteStore(tmp_path / "state.db"))
    children = []
    for name in ("one", "two"):
        here, there = socket.socketpair()
        thread = Thread(target=machine.server.serve, args=(there,), daemon=True)
        thread.start()
        machine.threads.append(thread)
        args = [sys.executable, "-c", WORKER, str(here.fileno()), name]
        children.append(subprocess.Popen(args, pass_fds=[here.fileno()]))
        here.close()
    assert [child.wait(60) for child in children] == [0, 0]
    machine.close()  # the threads end with the processes
    machine.store.close()
    with sqlite3.connect(tmp_path / "state.db") as kept:
        assert kept.execute("SELECT count(*) FROM record").fetchone() == (201,)
