"""`quota-proxy init`: what it writes goes together, nobody else can read it, nothing is lost."""

import ast
import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked import environment
from support.operating import quota_proxy

from proxy.config import Config, load_config


def made(folder: Path, *options: str) -> tuple[Config, str]:
    """Write files to a folder; give the configuration, and what was printed."""
    code, out, err = quota_proxy("init", "--dir", folder, *options)
    assert (code, err) == (0, "")
    return load_config(folder / "quota-proxy.yaml"), out


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def strings(job: str) -> set[str]:
    """All texts in a Python program."""
    nodes = ast.walk(ast.parse(job))
    return {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


FULL = """
import resource, sys
from proxy import cli
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, most))
sys.exit(cli.main())
"""
"""A disk on which no file gets longer."""


def test_a_configuration_that_serves_this_machine_alone(tmp_path: Path) -> None:
    config, out = made(tmp_path)
    assert names(tmp_path) == {"quota-proxy.yaml", "admin-token"}
    assert [str(server) for server in config.cluster.bootstrap_servers] == ["localhost:9092"]
    assert (config.queries, config.admin.tokens) == ((), ())
    assert config.admin.bind.is_loopback
    assert f"quota-proxy run -c {tmp_path}/quota-proxy.yaml" in out
    assert "job.py" not in out


def test_check_has_nothing_to_say_of_it(tmp_path: Path) -> None:
    made(tmp_path, "--spark", "orders")
    code, out, err = quota_proxy("check", "-c", tmp_path / "quota-proxy.yaml")
    lines = [line for line in out.splitlines() if "open files" not in line]
    assert (code, err) == (0, "")
    assert lines == [
        f"{tmp_path}/quota-proxy.yaml: valid, rules: 2, listeners: 1, queries: 1, pipelines: 0"
    ]


@pytest.mark.parametrize(
    ("options", "bootstrap", "url", "topic"),
    [
        ((), "localhost:19092", "http://localhost:9644", "orders"),
        (
            ("--host", "proxy.example", "--topic", "orders.v2"),
            "proxy.example:19092",
            "http://proxy.example:9644",
            "orders.v2",
        ),
        (("--host", "::1"), "[::1]:19092", "http://[::1]:9644", "orders"),
    ],
    ids=["local", "for others", "IPv6"],
)
def test_the_job_goes_with_the_configuration(
    tmp_path: Path, options: tuple[str, ...], bootstrap: str, url: str, topic: str
) -> None:
    config, _ = made(tmp_path, "--spark", "orders", *options)
    said = strings((tmp_path / "job.py").read_text())
    assert {"orders", bootstrap, url, topic, "spark-token", "checkpoint"} <= said

    (listener,), (query,), (token,) = config.listeners, config.queries, config.admin.tokens
    assert listener.advertised_host in bootstrap
    assert bootstrap.endswith(f":{listener.bind.port}")
    assert url.endswith(f":{config.admin.bind.port}")
    is_local = "proxy.example" not in options
    assert listener.bind.is_loopback is config.admin.bind.is_loopback is is_local
    assert (query.name, query.client_id, query.commit_group) == (
        *("orders", "orders"),
        "orders-progress",
    )
    assert config.quotas.rules[0].client_id == "orders"
    assert config.quotas.rules[0].adaptive is not None
    assert (token.token_file, token.rights) == (tmp_path / "spark-token", ("report",))


def test_brokers_are_those_that_are_named(tmp_path: Path) -> None:
    config, _ = made(tmp_path, "--bootstrap-servers", "broker-1:9092,[::1]:9093")
    servers = [str(server) for server in config.cluster.bootstrap_servers]
    assert servers == ["broker-1:9092", "[::1]:9093"]


@pytest.mark.parametrize("name", ["010", "1e5", "null", "true", "1_000", "a.b-c_d", "-x", "~"])
def test_a_name_is_a_name_whatever_yaml_takes_it_for(tmp_path: Path, name: str) -> None:
    code, _, err = quota_proxy("init", "--dir", tmp_path, f"--spark={name}")
    if name == "~":
        assert (code, "fix: " in err) == (2, True)
        return
    config = load_config(tmp_path / "quota-proxy.yaml")
    assert (config.queries[0].name, config.quotas.rules[0].client_id) == (name, name)
    assert name in strings((tmp_path / "job.py").read_text())


def test_tokens_are_new_each_time_and_their_owner_s_alone(tmp_path: Path) -> None:
    tokens = set()
    for number in range(2):
        folder = tmp_path / str(number) / "deep"
        made(folder, "--spark", "orders")
        for name in ("admin-token", "spark-token"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
            tokens.add((folder / name).read_text())
    assert len(tokens) == 4
    assert all(re.fullmatch(r"[\w-]{32}\n", token) for token in tokens)


@pytest.mark.parametrize("there", ["quota-proxy.yaml", "spark-token", "job.py"])
@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_nothing_is_overwritten_unless_that_is_asked_for(
    tmp_path: Path, there: str, kind: str
) -> None:
    folder, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    folder.mkdir()
    if kind == "file":
        (folder / there).write_text("mine\n")
        (folder / there).chmod(0o644)
    else:
        (folder / there).symlink_to(elsewhere)
    code, out, err = quota_proxy("init", "--dir", folder, "--spark", "orders")
    assert (code, out) == (2, "")
    assert f"{folder / there} is there already" in err
    assert "--force" in err
    assert names(folder) == {there}

    made(folder, "--spark", "orders", "--force")
    assert names(folder) == {"quota-proxy.yaml", "admin-token", "spark-token", "job.py"}
    assert not elsewhere.exists()
    assert stat.S_IMODE((folder / "spark-token").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--spark", "two words"), "'two words' is no name"),
        (("--spark", ".."), "'..' is no name"),
        (("--spark", 'a"b'), "is no name"),
        (("--bootstrap-servers", "broker-1"), "add the port: broker-1:PORT"),
        (("--bootstrap-servers", "a:1,,b:2"), '"" is not HOST:PORT'),
        (("--host", "0.0.0.0"), "stands for every interface"),
        (("--host", "proxy:19092"), "has a port"),
        (("--topic", "orders"), "name the query: --spark NAME"),
    ],
    ids=" ".join,
)
def test_bad_options_write_nothing(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    code, out, err = quota_proxy("init", "--dir", tmp_path, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert "fix: " in err
    assert names(tmp_path) == set()


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_what_is_no_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = quota_proxy("init", "--dir", tmp_path / folder)
    assert (code, out) == (2, "")
    assert f"{tmp_path / folder} is no folder" in err
    assert "fix: give another --dir" in err


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    made(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    words = "init", "--dir", str(tmp_path), "--spark", "orders", "--force"
    full = subprocess.run(
        [sys.executable, "-c", FULL.format(limit=len(before["quota-proxy.yaml"])), *words],
        env=environment(),
        check=False,
    )
    assert full.returncode == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_the_texts_of_the_files_are_safe_in_python_and_yaml(tmp_path: Path) -> None:
    """An address is quoted where YAML would not take it as it is."""
    config, _ = made(tmp_path, "--host", "10.0.0.1", "--spark", "a" * 249)
    assert config.listeners[0].advertised_host == "10.0.0.1"
    assert json.dumps("a" * 249) in (tmp_path / "job.py").read_text()
