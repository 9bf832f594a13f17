"""Fetches the jar files of Kafka and of Spark's Kafka connector, once for each user.

Pyspark ships Apache Ivy, so Python and Java are all that is needed: Ivy's own main class resolves
the modules from its default repository, or from where the user's settings file says
(`IVY_SETTINGS_VARIABLE`, or `spark.jars.ivySettings` in Spark's `spark-defaults.conf`).
"""

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from xml.etree import ElementTree

from proxy.devkit import DownloadError, JavaError, PysparkMissingError

KAFKA_VERSION = "4.1.0"
MIN_JAVA_VERSION = 17
IVY_SETTINGS_VARIABLE = "KAFKA_QUOTA_PROXY_IVY_SETTINGS"

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called as `progress(done, found, name)`: jars downloaded, modules found up to now, and the name
of the one just found (`done` is 0 then) or downloaded. Nothing is called when all is cached."""

_MANIFEST = "manifest.json"
_JAVA_TIMEOUT_S = 30
_FAULT_LINES = 12

_SETTINGS = """<ivysettings>
  <settings defaultResolver="central"/>
  <timeout-constraints>
    <timeout-constraint name="network" connectionTimeout="15000" readTimeout="60000"/>
  </timeout-constraints>
  <resolvers>
    <ibiblio name="central" m2compatible="true" timeoutConstraint="network"/>
  </resolvers>
</ivysettings>
"""

# What Ivy prints: a module whose description was found, a jar that has come, a thing that failed.
_FOUND = re.compile(r"^\tfound (?P<module>\S+) in ")
_DOWNLOADED = re.compile(r"^\t\[SUCCESSFUL *\] (?P<module>[^!\s]+)!")
_FAULT = re.compile(
    r"^\s*(?:Server access error.*|:: (?P<module>\S+#\S+: .*)|\[(?:FAILED|NOT FOUND) *\].*"
    r"|.*(?:Exception|[Ii]nvalid|[Ff]ailed).*)$"
)
_JAR_NAME = re.compile(r"^(?P<module>.+?)-(?P<version>\d.*)\.jar$")
_JAVA_VERSION = re.compile(r'version "(?:1\.)?(?P<major>\d+)')


@dataclass(frozen=True, slots=True)
class Module:
    """A module by its Maven coordinates."""

    organisation: str
    name: str
    revision: str

    def __str__(self) -> str:
        return f"{self.organisation}:{self.name}:{self.revision}"


@dataclass(frozen=True, slots=True)
class JarSet:
    """Modules that are fetched together, with all they depend on, into one cache folder."""

    folder: str
    """Name of the folder; holds the version, so that versions live side by side."""
    modules: tuple[Module, ...]
    """What is asked for."""
    provided: frozenset[str] = frozenset()
    """Names of modules that are there already and are not fetched."""


def kafka_jars(progress: Progress | None = None, cache_dir: Path | None = None) -> tuple[Path, ...]:
    """Give the class path of a Kafka broker: about 45 files, 43 MB; raises as `fetch` does."""
    modules = (
        Module("org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
        Module("org.slf4j", "slf4j-simple", "1.7.36"),
    )
    return fetch(JarSet(f"kafka-{KAFKA_VERSION}", modules), progress, cache_dir)


def connector_jars(
    progress: Progress | None = None, cache_dir: Path | None = None
) -> tuple[Path, ...]:
    """Give what Spark needs to read Kafka, less what pyspark ships: the value of `spark.jars`.

    The connector has the version of the installed pyspark and the Scala version of its jars.
    Raises as `fetch` does.
    """
    shipped = {
        match["module"]: match["version"]
        for jar in pyspark_jars_dir().glob("*.jar")
        if (match := _JAR_NAME.match(jar.name))
    }
    core = next((name for name in shipped if name.startswith("spark-core_")), None)
    if core is None:
        raise _pyspark_missing("spark-core is not among pyspark's jars")
    scala, version = core.partition("_")[2], importlib.metadata.version("pyspark")
    module = Module("org.apache.spark", f"spark-sql-kafka-0-10_{scala}", version)
    jar_set = JarSet(f"spark-kafka_{scala}-{version}", (module,), frozenset(shipped))
    return fetch(jar_set, progress, cache_dir)


def default_cache_dir() -> Path:
    """Give the user's cache folder for this project; it need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard wants a relative path to be ignored.
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".cache"
    return root / "kafka-quota-proxy"


def pyspark_jars_dir() -> Path:
    """Give the folder of pyspark's own jars; raises `PysparkMissingError` without pyspark."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise _pyspark_missing("pyspark is not installed")
    return Path(spec.origin).parent / "jars"


def find_java() -> Path:
    """Give the `java` that `JAVA_HOME` names, or else the first on the PATH.

    Raises `JavaError` when there is none, or it does not run, or is older than `MIN_JAVA_VERSION`.
    """
    how = f"Install Java {MIN_JAVA_VERSION} or newer, and let JAVA_HOME or PATH lead to it."
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin") if home else None)
    if found is None:
        where = f"in JAVA_HOME ({home})" if home else "on the PATH"
        raise JavaError(f"No Java was found {where}.", how)
    try:
        answer = subprocess.run(
            [found, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_JAVA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JavaError(f"{found} does not run: {error}", how) from error
    version = _JAVA_VERSION.search(answer.stderr)
    if version is None:
        raise JavaError(f"{found} does not tell its version: {answer.stderr.strip()}", how)
    if int(version["major"]) < MIN_JAVA_VERSION:
        raise JavaError(f"{found} is Java {version['major']}, which is too old.", how)
    return Path(found)


def fetch(
    jar_set: JarSet, progress: Progress | None = None, cache_dir: Path | None = None
) -> tuple[Path, ...]:
    """Give the files of a set in the order of their names, fetching them unless they are cached.

    A set is cached whole or not at all: it is put together in a folder beside its place and moved
    there at the end. One process fetches at a time, others wait for it and then find the set. What
    a broken download did get is kept until one succeeds.

    Raises one of the kinds of `DevkitError` when the set is not cached and can't be fetched.
    """
    cache = cache_dir or default_cache_dir()
    folder = cache / jar_set.folder
    jars = _cached(folder, jar_set)
    if jars is not None:
        return jars
    tell = progress or _say_nothing
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / "lock", tell):
            jars = _cached(folder, jar_set)
            if jars is None:
                jars = _fill(folder, jar_set, tell)
    except OSError as error:
        raise DownloadError(
            f"The cache can't be written: {error}",
            f"Make {cache} writable, or set XDG_CACHE_HOME to a folder that is.",
        ) from error
    return jars


def _fill(folder: Path, jar_set: JarSet, tell: Progress) -> tuple[Path, ...]:
    ivy_cache = folder.parent / "ivy"
    with tempfile.TemporaryDirectory(prefix="download-", dir=folder.parent) as name:
        work = Path(name)
        content = work / "content"
        content.mkdir()
        _run_ivy(jar_set, work, ivy_cache, content, tell)
        sizes = {jar.name: jar.stat().st_size for jar in sorted(content.glob("*.jar"))}
        manifest = {"modules": [str(module) for module in jar_set.modules], "jars": sizes}
        (content / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists():  # damaged, or of an older list of modules
            shutil.rmtree(folder)
        content.rename(folder)
    shutil.rmtree(ivy_cache, ignore_errors=True)
    return tuple(folder / name for name in sizes)


def _cached(folder: Path, jar_set: JarSet) -> tuple[Path, ...] | None:
    """Give the files of a whole set, None if it is not there or not whole."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes: dict[str, int] = manifest["jars"]
        whole = manifest["modules"] == [str(module) for module in jar_set.modules] and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return tuple(folder / name for name in sizes) if whole else None


def _run_ivy(jar_set: JarSet, work: Path, ivy_cache: Path, content: Path, tell: Progress) -> None:
    """Let Ivy put the set's jars into `content`; its own files go to `work` and `ivy_cache`."""
    ivy_jar = next(iter(sorted(pyspark_jars_dir().glob("ivy-*.jar"))), None)
    if ivy_jar is None:
        raise _pyspark_missing("Ivy is not among pyspark's jars")
    settings = _user_settings()
    if settings is None:
        settings = work / "ivysettings.xml"
        settings.write_text(_SETTINGS, encoding="utf-8")
    module_file = work / "ivy.xml"
    module_file.write_bytes(_module_xml(jar_set))
    command = [
        *(str(find_java()), "-cp", str(ivy_jar), "org.apache.ivy.Main"),
        *("-settings", str(settings), "-cache", str(ivy_cache), "-ivy", str(module_file)),
        *("-confs", "default", "-types", "jar", "bundle"),
        *("-retrieve", f"{content}/[artifact]-[revision](-[classifier]).[ext]"),
    ]
    found = done = 0
    faults: list[str] = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as ivy:
        assert ivy.stdout is not None
        try:
            for line in ivy.stdout:
                if match := _FOUND.match(line):
                    found += 1
                    tell(done, found, _jar_title(match["module"]))
                elif match := _DOWNLOADED.match(line):
                    done += 1
                    tell(done, found, _jar_title(match["module"]))
                elif match := _FAULT.match(line):
                    faults.append(match["module"] or line.strip())
        except BaseException:
            ivy.kill()
            raise
    if ivy.returncode != 0 or not any(content.glob("*.jar")):
        wanted = ", ".join(str(module) for module in jar_set.modules)
        reasons = "\n  ".join(list(dict.fromkeys(faults))[:_FAULT_LINES]) or "Ivy gave no reason"
        raise DownloadError(
            f"Download of {wanted} failed:\n  {reasons}",
            "Check the network. Behind an HTTP proxy set JAVA_TOOL_OPTIONS to "
            "'-Dhttps.proxyHost=HOST -Dhttps.proxyPort=PORT'; to use a mirror let "
            f"{IVY_SETTINGS_VARIABLE} name an Ivy settings file. Then run it again: "
            "it goes on where it stopped.",
        )


def _module_xml(jar_set: JarSet) -> bytes:
    """Describe the set to Ivy as a module that depends on what is wanted."""
    root = ElementTree.Element("ivy-module", version="2.0")
    ElementTree.SubElement(root, "info", organisation="local", module=jar_set.folder)
    configurations = ElementTree.SubElement(root, "configurations")
    ElementTree.SubElement(configurations, "conf", name="default")
    dependencies = ElementTree.SubElement(root, "dependencies")
    for module in jar_set.modules:
        ElementTree.SubElement(
            dependencies,
            "dependency",
            org=module.organisation,
            name=module.name,
            rev=module.revision,
            conf="default->default",
        )
    for name in sorted(jar_set.provided):
        ElementTree.SubElement(dependencies, "exclude", module=name)
    return ElementTree.tostring(root)


def _user_settings() -> Path | None:
    """Find the Ivy settings file that the user chose; None means the default repository.

    Raises `DownloadError` when it is named but not there.
    """
    named, by = os.environ.get(IVY_SETTINGS_VARIABLE), IVY_SETTINGS_VARIABLE
    if not named:
        spark_home = os.environ.get("SPARK_HOME")
        conf = os.environ.get("SPARK_CONF_DIR") or (spark_home and f"{spark_home}/conf")
        defaults = Path(conf or pyspark_jars_dir().parent / "conf") / "spark-defaults.conf"
        with contextlib.suppress(FileNotFoundError):
            match = re.search(
                r"^\s*spark\.jars\.ivySettings[\s=:]+(\S.*?)\s*$",
                defaults.read_text(encoding="utf-8"),
                re.MULTILINE,
            )
            named, by = match and match[1], f"spark.jars.ivySettings in {defaults}"
    if not named:
        return None
    path = Path(named.removeprefix("file://")).expanduser()
    if not path.is_file():
        raise DownloadError(
            f"There is no Ivy settings file {path}.", f"Mend {by}, which names it, or take it out."
        )
    return path


@contextlib.contextmanager
def _locked(path: Path, tell: Progress) -> Iterator[None]:
    """Hold the file's lock; the kernel gives it up when the process ends, however it ends."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(0, 0, "waiting for a download by another process")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _jar_title(module: str) -> str:
    """Shorten Ivy's `organisation#name;revision` to `name-revision`."""
    return module.rpartition("#")[2].replace(";", "-")


def _pyspark_missing(what: str) -> PysparkMissingError:
    return PysparkMissingError(
        f"The downloader is missing: {what}.", "Run: pip install 'kafka-quota-proxy[demo]'"
    )


def _say_nothing(done: int, found: int, name: str) -> None:
    """Take progress that nobody asked for."""
    del done, found, name
