"""The README's first hour: its files are those that `init` writes, and they run word for word."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyspark
import pytest
from support.operating import quota_proxy
from support.private_network import PrivateNetwork, private_network
from support.proxy_process import until

from examples.devkit.jars import default_cache_dir

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMAND = Path(sys.executable).with_name("quota-proxy")
LISTENER_FILE = ROOT / "proxy" / "spark" / "quota_listener.py"
SPARK_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"

RECORDS = 1000
PARTITIONS = 2
START_S = 120
READ_S = 400
"""For Spark to start and to have read all, on a machine that is busy with much else."""

FEED = f"""
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
import sys

servers = {{"bootstrap.servers": "localhost:9092"}}
admin = AdminClient(servers)
if sys.argv[1] == "make":
    admin.create_topics([NewTopic("orders", {PARTITIONS}, 1)])["orders"].result(60)
producer = Producer(servers)
for number in range({RECORDS}):
    producer.produce("orders", b"%d" % number, partition=number % {PARTITIONS})
sys.exit(producer.flush(60))
"""
AWAIT = """
import json, sys, time, urllib.request

committed = None
while committed != int(sys.argv[1]):
    time.sleep(0.1)
    try:
        answer = urllib.request.urlopen("http://localhost:9644/v1/progress?query=orders")
    except OSError:
        continue
    partitions = json.load(answer)["queries"][0]["partitions"]
    committed = sum(each["committed"] or 0 for each in partitions)
"""
"""A program that ends when so many records are committed by what the proxy knows of the query."""


def shown(language: str) -> str:
    """Give the README's first file in a language."""
    text, *_ = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return str(text)


def connector() -> str:
    """Give what the job says of spark-submit's option --packages, for the pyspark that is here."""
    (name,) = re.findall(r"--packages (\S+)", shown("python"))
    return f"{name.rpartition(':')[0]}:{pyspark.__version__}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the README's own command has written its files."""
    (command,) = re.findall(r"^quota-proxy (init .*?) *#", README, re.MULTILINE)
    code, _, err = quota_proxy(*command.split(), "--dir", tmp_path / "first")
    assert (code, err) == (0, "")
    return tmp_path / "first"


def test_the_files_that_are_shown_are_those_that_init_writes(folder: Path) -> None:
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert files.keys() == {"quota-proxy.yaml", "job.py", "admin-token", "spark-token"}
    assert files["quota-proxy.yaml"] == shown("yaml")
    assert files["job.py"] == shown("python")


def test_every_command_that_is_named_is_there() -> None:
    names = set(re.findall(r"(?<!-)quota-proxy ([a-z]+)\b", README))
    assert {"init", "run", "check", "doctor", "top"} <= names
    for name in sorted(names):
        assert quota_proxy(name, "--help")[0] == 0, name


@pytest.mark.parametrize("has_package", [True, False], ids=["installed", "with --py-files"])
def test_the_import_works_with_the_package_and_with_its_one_file(
    tmp_path: Path, has_package: bool
) -> None:
    imports, found, _ = shown("python").partition('NAME = "orders"')
    assert found
    path = tmp_path / "path"
    path.mkdir()
    command, paths = [sys.executable], [path]
    if not has_package:
        command.append("-S")  # nor does an editable install find it
        paths.append(Path(pyspark.__file__).parents[1])
        (path / "proxy").mkdir()  # somebody else's package of that name
        (path / "proxy" / "__init__.py").touch()
        shutil.copy(LISTENER_FILE, path)
    script = tmp_path / "job.py"
    script.write_text(imports + "print(QuotaListener.__module__)\n")
    done = subprocess.run(
        [*command, script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    module = "proxy.spark.quota_listener" if has_package else "quota_listener"
    assert (done.returncode, done.stdout) == (0, f"{module}\n"), done.stderr


@pytest.fixture(scope="module")
def spark_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of Spark whose packages are fetched already: a private network has no way out."""
    conf, empty = tmp_path_factory.mktemp("conf"), tmp_path_factory.mktemp("empty") / "empty.py"
    empty.touch()
    cache = default_cache_dir() / f"packages-{pyspark.__version__}"
    settings = {"spark.jars.ivy": cache, "spark.ui.enabled": "false"}
    text = "".join(f"{key} {value}\n" for key, value in settings.items())
    (conf / "spark-defaults.conf").write_text(text)
    if not list(cache.glob("jars/*spark-sql-kafka*")):
        fetched = subprocess.run(
            [SPARK_SUBMIT, "--packages", connector(), empty],
            env={**os.environ, "SPARK_CONF_DIR": str(conf)},
            capture_output=True,
            text=True,
            timeout=READ_S,
            check=False,
        )
        assert fetched.returncode == 0, fetched.stderr
    return conf


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    with private_network() as made:
        yield made


def by_itself(folder: Path) -> tuple[list[object], dict[str, str]]:
    """Give the README's own command, and what it needs to be set: nothing."""
    assert re.search(r"^python job\.py\b", README, re.MULTILINE)
    return [sys.executable, "job.py"], {}


def by_spark_submit(folder: Path) -> tuple[list[object], dict[str, str]]:
    """Give the command that the job shows, where the package is not installed."""
    elsewhere = folder / "elsewhere"  # in its place is somebody else's of that name
    (elsewhere / "proxy").mkdir(parents=True)
    (elsewhere / "proxy" / "__init__.py").touch()
    shutil.copy(LISTENER_FILE, folder)
    said = re.sub(r"[#\\]", "", shown("python")).partition("spark-submit --packages ")[2]
    options = said.split()[:4]
    assert options == [connector(), "--py-files", "quota_listener.py", "job.py"]
    env = {"PYTHONPATH": str(elsewhere), "PYSPARK_PYTHON": sys.executable}
    return [SPARK_SUBMIT, "--packages", *options], env


@pytest.mark.slow
@pytest.mark.parametrize("start", [by_itself, by_spark_submit])
def test_the_files_that_are_shown_run_word_for_word(
    folder: Path,
    network: PrivateNetwork,
    spark_conf: Path,
    start: Callable[[Path], tuple[list[object], dict[str, str]]],
) -> None:
    """With the addresses that they have, which nobody else has in a network of their own."""
    (folder / "quota-proxy.yaml").write_text(shown("yaml"))
    (folder / "job.py").write_text(shown("python"))
    doctor = (COMMAND, "doctor", "orders", "-c", folder / "quota-proxy.yaml")
    broker, proxy = folder / "broker.log", folder / "proxy.log"
    network.start(
        broker, COMMAND, "broker", "--port", 9092, "--data", folder / "broker", cwd=folder
    )
    until(lambda: "ready " in broker.read_text(), "the broker is ready", START_S)
    assert network.run(sys.executable, "-c", FEED, "make") == (0, "")
    network.start(proxy, COMMAND, "run", "-c", "quota-proxy.yaml", cwd=folder)
    until(lambda: "ready\n" in proxy.read_text(), "the proxy is ready", START_S)
    code, out = network.run(*doctor)
    assert (code, out.endswith("orders: 2 to mend\n")) == (1, True), out

    command, own = start(folder)
    env = {"SPARK_CONF_DIR": str(spark_conf), "SPARK_LOCAL_IP": "127.0.0.1", **own}
    job = network.start(folder / "job.log", *command, cwd=folder, env=env)

    def until_completed(records: int) -> None:
        said = folder / "await.log"
        waiting = network.start(said, sys.executable, "-c", AWAIT, records, cwd=folder)

        def is_completed() -> bool:
            assert job.poll() is None, (folder / "job.log").read_text()
            return waiting.poll() is not None

        until(is_completed, f"{records} records are read and committed", READ_S)
        assert waiting.returncode == 0, said.read_text()

    until_completed(RECORDS)
    assert network.run(sys.executable, "-c", FEED, "more") == (0, "")
    until_completed(2 * RECORDS)
    assert list((folder / "output").glob("*.parquet"))
    code, out = network.run(*doctor)
    assert (code, out.endswith("orders: nothing is wrong\n")) == (0, True), out
    assert "not checked" not in out
