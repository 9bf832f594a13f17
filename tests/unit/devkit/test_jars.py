"""Jars are fetched once, whole, from where the user says; what hinders that is told."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.devkit import DownloadError, PysparkMissingError
from examples.devkit.ivy import IVY_SETTINGS_VARIABLE
from examples.devkit.jars import JarSet, default_cache_dir, fetch
from examples.devkit.loopback import free_ports

pytestmark = pytest.mark.slow

LEAF = "example:leaf:1"
ROOT = "example:root:2"
POM = """<project><modelVersion>4.0.0</modelVersion><groupId>example</groupId>
<artifactId>{name}</artifactId><version>{revision}</version>{more}</project>"""
NEEDS_LEAF = """<dependencies><dependency><groupId>example</groupId><artifactId>leaf</artifactId>
<version>1</version></dependency></dependencies>"""


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository on disk in which `root` needs `leaf`; gives the settings file that names it."""
    base = tmp_path / "mirror"
    for module, more in ((LEAF, ""), (ROOT, NEEDS_LEAF)):
        group, name, revision = module.split(":")
        folder = base / group / name / revision
        folder.mkdir(parents=True)
        stem = f"{name}-{revision}"
        (folder / f"{stem}.pom").write_text(POM.format(name=name, revision=revision, more=more))
        (folder / f"{stem}.jar").write_bytes(f"jar of {name}".encode())
    pattern = f"{base}/[organisation]/[module]/[revision]/[module]-[revision]"
    settings = tmp_path / "settings.xml"
    settings.write_text(
        '<ivysettings><settings defaultResolver="disk"/><resolvers>'
        f'<filesystem name="disk" m2compatible="true"><ivy pattern="{pattern}.pom"/>'
        f'<artifact pattern="{pattern}.[ext]"/></filesystem></resolvers></ivysettings>'
    )
    monkeypatch.setenv(IVY_SETTINGS_VARIABLE, str(settings))
    return settings


@pytest.mark.usefixtures("mirror")
def test_jars_are_cached_whole_or_not_at_all(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    cache, jar_set = tmp_path / "cache", JarSet("both", (ROOT,))

    def get() -> tuple[Path, ...]:
        return fetch(jar_set, lambda *step: said.append(step), cache)

    leaf, root = get()
    assert (leaf, root) == (cache / "both" / "leaf-1.jar", cache / "both" / "root-2.jar")
    assert said == [(0, 1, "root-2"), (0, 2, "leaf-1"), (1, 2, "root-2"), (2, 2, "leaf-1")]
    assert sorted(path.name for path in cache.iterdir()) == ["both", "lock"]

    assert get() == (leaf, root)
    assert len(said) == 4, "a cached set is not fetched again"

    for damage in (lambda: leaf.write_bytes(b"jar"), root.unlink):
        damage()
        assert get() == (leaf, root), "a damaged set is fetched again"
        assert (leaf.read_bytes(), root.read_bytes()) == (b"jar of leaf", b"jar of root")


@pytest.mark.usefixtures("mirror")
def test_one_of_many_fetches_and_the_others_wait(tmp_path: Path) -> None:
    said: list[tuple[int, int, str]] = []
    with ThreadPoolExecutor(3) as pool:
        tasks = [
            pool.submit(fetch, JarSet("leaf", (LEAF,)), lambda *step: said.append(step), tmp_path)
            for _ in range(3)
        ]
    assert [task.result() for task in tasks] == [(tmp_path / "leaf" / "leaf-1.jar",)] * 3
    assert said.count((1, 1, "leaf-1")) == 1


@pytest.mark.usefixtures("mirror")
def test_what_is_provided_is_not_fetched(tmp_path: Path) -> None:
    jars = fetch(JarSet("less", (ROOT,), frozenset({"leaf"})), None, tmp_path)
    assert [jar.name for jar in jars] == ["root-2.jar"]


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize("absent", ["example:nothing:1", ROOT], ids=["all", "part"])
def test_failed_download_names_the_artifact_and_the_way_out(tmp_path: Path, absent: str) -> None:
    cache = tmp_path / "cache"
    (tmp_path / "mirror/example/leaf/1/leaf-1.jar").unlink()
    with pytest.raises(DownloadError, match=f"Download of {absent} failed") as caught:
        fetch(JarSet("broken", (absent,)), None, cache)
    named = "example#nothing;1: not found" if absent is not ROOT else "example#leaf;1"
    assert named in caught.value.what
    assert all(word in caught.value.how for word in ("proxyHost", IVY_SETTINGS_VARIABLE))
    assert not (cache / "broken").exists()


def test_a_server_that_can_not_be_reached_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(IVY_SETTINGS_VARIABLE, raising=False)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (port,) = free_ports(1)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort={port}")
    with pytest.raises(DownloadError, match="Connection refused"):
        fetch(JarSet("far", (LEAF,)), None, tmp_path)


def test_settings_named_by_spark(
    tmp_path: Path, mirror: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(IVY_SETTINGS_VARIABLE)
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    (tmp_path / "spark-defaults.conf").write_text(f"spark.jars.ivySettings  {mirror}\n")
    assert fetch(JarSet("leaf", (LEAF,)), None, tmp_path)[0].read_bytes() == b"jar of leaf"

    mirror.unlink()
    with pytest.raises(DownloadError, match="no Ivy settings file") as caught:
        fetch(JarSet("other", (LEAF,)), None, tmp_path)
    assert "spark-defaults.conf" in caught.value.how


def test_a_cache_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="cache can't be written"):
        fetch(JarSet("leaf", (LEAF,)), None, tmp_path / "file" / "cache")


def test_missing_pyspark_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(PysparkMissingError, match="pyspark is not installed") as caught:
        fetch(JarSet("leaf", (LEAF,)), None, tmp_path)
    assert "pip install" in caught.value.how


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("/c", "/c/kafka-quota-proxy"),
        ("", "/h/.cache/kafka-quota-proxy"),
        ("c", "/h/.cache/kafka-quota-proxy"),
    ],
    ids=["set", "empty", "relative"],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, variable: str, folder: str) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_cache_dir() == Path(folder)
