"""Exit codes and messages of the commands; never a traceback."""

import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.forked import environment
from support.operating import quota_proxy, running
from support.proxy_process import HOST, WAIT_S, ProxyProcess, config, until

from examples.devkit.broker import EmbeddedBroker
from examples.devkit.loopback import free_ports

NOBODY = f"{HOST}:9"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def to_file(text: str) -> Path:
        file = tmp_path / "proxy.yaml"
        file.write_text(text)
        return file

    return to_file


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: [", "proxy.yaml:1"),
        ("quotas: 5\n", "proxy.yaml"),
        (yaml.safe_dump(config(NOBODY) | {"speed": 1}), "speed"),
        (yaml.safe_dump(config(NOBODY, limits={"idle_timeout": "fast"})), "idle_timeout"),
        ("#" * (4 * 2**20 + 1), "has more than 4 MiB, which is too long"),
    ],
    ids=["no YAML", "no sections", "unknown key", "bad value", "too long"],
)
def test_bad_configuration(
    write: Callable[[str], Path],
    command: str,
    text: str,
    message: str,
) -> None:
    code, out, err = quota_proxy(command, "-c", write(text))
    assert (code, out) == (2, "")
    assert message in err
    assert "fix: " in err


INTERRUPTED = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
runpy.run_module("proxy", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["proxy.cli", "uvloop", "proxy.wire.fetch"])
def test_an_interrupt_while_it_imports_ends_it_without_a_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module]
    done = subprocess.run(command, env=environment(), capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("command", ["run", "check"])
def test_no_such_file(tmp_path: Path, command: str) -> None:
    code, out, err = quota_proxy(command, "-c", tmp_path / "nothing.yaml")
    assert (code, out) == (2, "")
    assert "nothing.yaml" in err


@pytest.mark.parametrize("where", ["listeners", "admin"])
def test_port_in_use(write: Callable[[str], Path], where: str) -> None:
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        document = config(NOBODY)
        if where == "admin":
            document["admin"]["bind"] = address
        else:
            document["listeners"][0]["bind"] = address
        code, out, err = quota_proxy("run", "-c", write(yaml.safe_dump(document)))
    assert (code, out) == (1, "")
    (line,) = [line for line in err.splitlines() if address in line and "in use" in line]
    assert not line.startswith("{")
    assert "fix: " in err


@pytest.mark.parametrize("most", [13, 14, 15])
def test_too_few_open_files_to_open_the_ports(write: Callable[[str], Path], most: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "proxy", "run", "-c", write(yaml.safe_dump(config(NOBODY)))],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)),
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Too many open files\n    fix: raise the limit of open files" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments",
    [(), ("fly",), ("run",), ("check",), ("broker",), ("broker", "--port", "x", "--data", "d")],
    ids=" ".join,
)
def test_bad_usage(arguments: tuple[str, ...]) -> None:
    code, out, err = quota_proxy(*arguments)
    assert (code, out) == (2, "")
    assert "usage: " in err


def test_help() -> None:
    """Started as its users start it."""
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in ("run", "check", "demo", "broker"))


CLOSED = ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"]


def started_with(redirection: str, *arguments: object) -> list[str]:
    """Give the command by which a shell starts ours with descriptors of its own."""
    program = [sys.executable, "-m", "proxy", *map(str, arguments)]
    return ["bash", "-c", f'exec "$@" {redirection}', "bash", *program]


@pytest.mark.parametrize("closed", CLOSED)
def test_run_ends_in_order_when_standard_descriptors_are_closed(
    kafka: EmbeddedBroker, write: Callable[[str], Path], closed: str
) -> None:
    (port,) = free_ports(1)
    document = config(kafka.bootstrap)
    document["listeners"][0]["bind"] = f"{HOST}:{port}"
    command = started_with(closed, "run", "-c", write(yaml.safe_dump(document)))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:

        def is_ready() -> bool:
            assert process.poll() is None, f"exit code {process.returncode}"
            with socket.socket() as client:
                return client.connect_ex((HOST, port)) == 0

        try:
            until(is_ready, "connected")
            process.terminate()
            _, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert b"Traceback" not in err


@pytest.mark.parametrize("closed", CLOSED)
def test_check_works_when_standard_descriptors_are_closed(
    write: Callable[[str], Path], closed: str
) -> None:
    file = write(yaml.safe_dump(config(NOBODY)))
    for name, code in ((file, 0), (file.with_name("nothing.yaml"), 2)):
        command = started_with(closed, "check", "-c", name)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)


def test_what_the_terminal_cannot_show_is_escaped(write: Callable[[str], Path]) -> None:
    file = write(yaml.safe_dump(config(NOBODY)))
    command = started_with("", "check", "-c", file, "--client-id", "\u03a9-x")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u03a9-x" in done.stdout


def test_the_demo_is_not_installed_with_the_proxy(tmp_path: Path) -> None:
    for name in ("proxy", "metrics"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-m", "proxy", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in (f"{tmp_path}/examples/demo", "fix: run `make demo`"))


RULES = [
    {"client-id": "etl", "consumer_byte_rate": "10MiB"},
    {"client-id-prefix": "consumer-", "scope": "shared", "consumer_byte_rate": "20MiB"},
    {"user": "alice", "client-id": "<default>", "consumer_byte_rate": "2MiB"},
]


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("--client-id", "etl"), "consumer_byte_rate: 10MiB per second"),
        (("--client-id", "consumer-7"), "consumer_byte_rate: 20MiB per second"),
        (("--user", "alice", "--client-id", "etl"), "consumer_byte_rate: 2MiB per second"),
        (("--client-id", "other"), "consumer_byte_rate: no limit"),
    ],
    ids=["exact", "prefix", "user", "none"],
)
def test_check_says_which_rule_a_client_gets(
    write: Callable[[str], Path],
    client: tuple[str, ...],
    expected: str,
) -> None:
    code, out, err = quota_proxy(
        "check", "-c", write(yaml.safe_dump(config(NOBODY, rules=RULES))), *client
    )
    assert (code, err) == (0, "")
    assert "valid, rules: 3" in out
    assert expected in out.splitlines()


def test_check_looks_for_a_client_as_it_is_known(write: Callable[[str], Path]) -> None:
    longest, longer = "x" * 255, "y" * 256
    rules = [{"client-id": name, "consumer_byte_rate": "1MiB"} for name in (longest, longer)]
    file = write(yaml.safe_dump(config(NOBODY, rules=rules)))
    for name, bound in ((longest, "1MiB per second"), (longer, "no limit")):
        code, out, _ = quota_proxy("check", "-c", file, "--client-id", name)
        assert code == 0
        assert f"\nconsumer_byte_rate: {bound}\n" in out


def test_check_says_which_topics_of_a_client_are_bounded(write: Callable[[str], Path]) -> None:
    by_topic = [
        {"client-id": "etl", "topic-prefix": "logs-", "producer_byte_rate": "5MiB"},
        {"topic": "clicks", "consumer_byte_rate": "80MiB"},
        {"client-id": "other", "topic": "clicks", "consumer_byte_rate": "1MiB"},
    ]
    file = write(yaml.safe_dump(config(NOBODY, rules=[*RULES, *by_topic])))
    code, out, err = quota_proxy("check", "-c", file, "--client-id", "etl")
    assert (code, err) == (0, "")
    told = [
        line.partition(" by rule ")[0].strip() for line in out.splitlines() if " by rule " in line
    ]
    assert told == ["80MiB per second of topic=clicks", "5MiB per second of topic-prefix=logs-"]


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        (("--user", "etl", "--client-id", "etl"), "max_connections: 40 connections"),
        (("--user", "etl", "--client-id", "other"), "max_connections: 40 connections"),
        (("--user", "other", "--client-id", "etl"), "max_connections: 20 connections"),
        (("--client-id", "etl"), "max_connections: 5 connections"),
    ],
    ids=["the user", "by any name", "another user", "a stranger by that name"],
)
def test_the_rules_of_the_documentation_keep_strangers_out_of_places(
    write: Callable[[str], Path], client: tuple[str, ...], expected: str
) -> None:
    page = (ROOT / "docs/expectations.md").read_text()
    _, _, rest = page.partition("<!-- users: begin -->\n```yaml\n")
    text, _, _ = rest.partition("```\n<!-- users: end -->")
    file = write(yaml.safe_dump(config(NOBODY) | yaml.safe_load(text)))
    code, out, err = quota_proxy("check", "-c", file, *client)
    assert (code, err) == (0, "")
    assert expected in out.splitlines()


def test_the_budgets_of_the_documentation_are_sound(write: Callable[[str], Path]) -> None:
    quotas = (ROOT / "docs/quotas.md").read_text()
    _, _, rest = quotas.partition("<!-- budgets: begin -->\n```yaml\n")
    text, _, _ = rest.partition("```\n<!-- budgets: end -->")
    _, second = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    for each in (text, second):
        file = write(yaml.safe_dump(config(NOBODY) | yaml.safe_load(each)))
        code, out, err = quota_proxy("check", "-c", file)
        assert (code, err) == (0, "")
        assert "client-id=etl-orders: 150MiB per second when all want more" in out


DEFAULT = {"client-id": "<default>", "consumer_byte_rate": "50MiB"}


@pytest.mark.parametrize(
    ("rules", "source", "notes"),
    [
        (RULES, "file", ["no rule bounds clients that no rule names; fix: add {client-id: <def"]),
        ([*RULES, DEFAULT], "file", ["rule 3 (", "with each new client id"]),
        ([*RULES, DEFAULT | {"scope": "shared"}], "file", []),
        (RULES, "kafka", ["quotas.source is kafka: "]),
    ],
    ids=["no default", "a default for each", "a default for all", "the cluster's come on top"],
)
def test_check_says_what_is_open_to_clients_without_a_rule(
    write: Callable[[str], Path], rules: list[dict[str, str]], source: str, notes: list[str]
) -> None:
    document = config(NOBODY, rules=rules, limits={"max_connections": 100})
    document["quotas"]["source"] = source
    code, out, err = quota_proxy("check", "-c", write(yaml.safe_dump(document)))
    _, *lines = out.splitlines()
    assert (code, err, len(lines)) == (0, "", bool(notes))
    assert all(note in lines[0] for note in notes)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_check_says_when_adaptive_rules_do_not_outlive_a_restart(
    write: Callable[[str], Path], kind: str
) -> None:
    rules = [{"client-id": "etl", "consumer_byte_rate": "10MiB", "adaptive": {}}]
    document = config(NOBODY, rules=rules) | {"state": {"kind": kind}}
    code, out, err = quota_proxy("check", "-c", write(yaml.safe_dump(document)))
    assert (code, err) == (0, "")
    assert ("state.kind is memory: after a restart" in out) is (kind == "memory")


WHEN = {"days": "mon", "from": "22:00", "to": "06:00", "timezone": "Europe/Berlin"}


@pytest.mark.parametrize(
    ("at", "code"),
    [
        ("9999-12-31T23:59", 2),
        ("9999-12-31T23:59-12:00", 2),
        ("0001-01-01T00:00+14:00", 2),
        ("9998-12-31T23:59-12:00", 0),
        ("0002-01-01T00:00+14:00", 0),
    ],
)
def test_check_at_the_ends_of_the_calendar(
    write: Callable[[str], Path], at: str, code: int
) -> None:
    rule = {"client-id": "etl", "consumer_byte_rate": "1MiB", "when": WHEN}
    file = write(yaml.safe_dump(config(NOBODY, rules=[rule])))
    got, _, err = quota_proxy("check", "-c", file, "--at", at)
    assert got == code, err
    assert (f"{at!r} is not a time such as" in err) is (code != 0)


def test_check_of_an_unknown_listener(write: Callable[[str], Path]) -> None:
    file = write(yaml.safe_dump(config(NOBODY)))
    code, _, err = quota_proxy("check", "-c", file, "--listener", "nowhere")
    assert code == 2
    assert "'nowhere'" in err
    assert "default" in err


def test_broker_on_a_taken_port(kafka: EmbeddedBroker, tmp_path: Path) -> None:
    code, out, err = quota_proxy("broker", "--port", kafka.port, "--data", tmp_path)
    assert (code, out) == (1, "")
    assert f"{kafka.port}" in err


def test_second_signal_changes_nothing(proxy: Callable[..., ProxyProcess]) -> None:
    running = proxy()
    running.terminate()
    running.terminate()
    assert running.wait() == 0


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_at_the_very_end_changes_nothing(
    kafka: EmbeddedBroker, tmp_path: Path, name: str
) -> None:
    """When Python ends, which takes a tenth of a second, it takes its handlers back first."""
    signal_at_end = f"""
import os, signal, sys
class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{name}):
        kill(pid, number)
sys.ps1 = Last()
"""
    with running(ProxyProcess(config(kafka.bootstrap), tmp_path, changes=signal_at_end)) as proxy:
        proxy.terminate()
