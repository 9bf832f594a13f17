"""Returns the jar files of Kafka and of Spark's Kafka connector, fetched once for each user."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from examples.devkit import DownloadError, PysparkMissingError
from examples.devkit.ivy import OnDownload, download, pyspark_jars_dir

KAFKA_VERSION = "4.1.0"

_MANIFEST = "manifest.json"
_JAR_NAME = re.compile(r"^(?P<module>.+?)-(?P<version>\d.*)\.jar$")


@dataclass(frozen=True, slots=True)
class JarSet:
    """Modules that are fetched together, with all they depend on, into one cache folder."""

    folder: str
    """Name of the folder; holds the version, so that versions live side by side."""
    modules: tuple[str, ...]
    """What is asked for, by Maven coordinates: `organisation:name:revision`."""
    provided: frozenset[str] = frozenset()
    """Names of modules that are there already and are not fetched."""


def kafka_jars(on_download: OnDownload | None = None) -> tuple[Path, ...]:
    """Return the class path of a Kafka broker: about 45 files, 43 MB; raises as `fetch` does."""
    modules = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")
    return fetch(JarSet(f"kafka-{KAFKA_VERSION}", modules), on_download)


def connector_jars(on_download: OnDownload | None = None) -> tuple[Path, ...]:
    """Return what Spark needs to read Kafka, less what pyspark ships: the value of `spark.jars`.

    The connector has pyspark's version and the Scala version of its jars. Raises as `fetch` does.
    """
    shipped = {
        match["module"]: match["version"]
        for jar in pyspark_jars_dir().glob("*.jar")
        if (match := _JAR_NAME.match(jar.name))
    }
    core = next((name for name in shipped if name.startswith("spark-core_")), None)
    if core is None:
        raise PysparkMissingError("spark-core is not among pyspark's jars")
    scala, version = core.partition("_")[2], importlib.metadata.version("pyspark")
    module = f"org.apache.spark:spark-sql-kafka-0-10_{scala}:{version}"
    jar_set = JarSet(f"spark-kafka_{scala}-{version}", (module,), frozenset(shipped))
    return fetch(jar_set, on_download)


def default_cache_dir() -> Path:
    """Return the user's cache folder for this project; it need not exist yet."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard wants a relative path to be ignored.
    return (base if base.is_absolute() else Path.home() / ".cache") / "kafka-quota-proxy"


def fetch(
    jar_set: JarSet, on_download: OnDownload | None = None, cache_dir: Path | None = None
) -> tuple[Path, ...]:
    """Return the files of a set in the order of their names, fetching them unless they are cached.

    A set is cached whole or not at all: it is put together in a folder beside its place and moved
    there at the end. One process fetches at a time, others wait for it and then find the set. What
    a broken download did get is kept until one succeeds. Raises `DevkitError`.
    """
    cache = cache_dir or default_cache_dir()
    folder = cache / jar_set.folder
    if jars := _cached(folder, jar_set):
        return jars
    on_download = on_download or (lambda _done, _found, _name: None)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / "lock", on_download):
            return _cached(folder, jar_set) or _fill(folder, jar_set, on_download)
    except OSError as error:
        how = f"Make {cache} writable, or set XDG_CACHE_HOME to a folder that is."
        raise DownloadError(f"The cache can't be written: {error}", how) from error


def _fill(folder: Path, jar_set: JarSet, on_download: OnDownload) -> tuple[Path, ...]:
    ivy_cache = folder.parent / "ivy"
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as name:
        work = Path(name)
        content = work / "content"
        content.mkdir()
        modules, provided = jar_set.modules, jar_set.provided
        download(
            modules, provided, content, work=work, ivy_cache=ivy_cache, on_download=on_download
        )
        sizes = {jar.name: jar.stat().st_size for jar in sorted(content.glob("*.jar"))}
        manifest = {"modules": list(jar_set.modules), "jars": sizes}
        (content / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists():  # damaged, or of an older list of modules
            shutil.rmtree(folder)
        content.rename(folder)
    shutil.rmtree(ivy_cache, ignore_errors=True)
    return tuple(folder / name for name in sizes)


def _cached(folder: Path, jar_set: JarSet) -> tuple[Path, ...]:
    """Return the files of a whole set, none if it is not there or not whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes: dict[str, int] = manifest["jars"]
        whole = manifest["modules"] == list(jar_set.modules) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return ()
    return tuple(folder / name for name in sizes) if whole else ()


@contextlib.contextmanager
def _locked(path: Path, on_download: OnDownload) -> Iterator[None]:
    """Hold the file's lock; the kernel gives it up when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_download(0, 0, "waiting for a download by another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
