"""Downloads modules and all they depend on with the Apache Ivy that pyspark ships.

They come from its default repository, or from where the user's settings file says
(`IVY_SETTINGS_VARIABLE`, or `spark.jars.ivySettings` in Spark's `spark-defaults.conf`).
"""

import contextlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeAlias

from examples.devkit import DownloadError, PysparkMissingError
from examples.devkit.java import find_java

IVY_SETTINGS_VARIABLE = "KAFKA_QUOTA_PROXY_IVY_SETTINGS"

OnDownload: TypeAlias = Callable[[int, int, str], None]
"""Called as `on_download(done, found, name)`: jars downloaded, modules found up to now, and the
name of the one just found (`done` is 0 then) or downloaded. Never called when all is cached."""

_FAULT_LINES = 12
_IVY_SETTINGS = re.compile(r"^\s*spark\.jars\.ivySettings[\s=:]+(\S.*?)\s*$", re.MULTILINE)

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

# What Ivy prints: a module's description was found, or its jar has come; something failed.
_STEP = re.compile(
    r"^\t(?:(?P<found>found)|\[SUCCESSFUL *\]) [^#\s]+#(?P<name>[^;\s]+);(?P<revision>[^!\s]+)"
)
_FAULT = re.compile(
    r"^\s*(?:Server access error.*|:: (?P<module>\S+#\S+: .*)|\[(?:FAILED|NOT FOUND) *\].*"
    r"|.*(?:Exception|[Ii]nvalid|[Ff]ailed).*)$"
)


def pyspark_jars_dir() -> Path:
    """Return the folder of pyspark's own jars; raises `PysparkMissingError` without pyspark."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise PysparkMissingError("pyspark is not installed")
    return Path(spec.origin).parent / "jars"


def download(
    modules: Sequence[str],
    provided: Collection[str],
    content: Path,
    *,
    work: Path,
    ivy_cache: Path,
    on_download: OnDownload,
) -> None:
    """Put the jars of the modules, and of all they depend on, into the folder `content`.

    `modules` are Maven coordinates, `organisation:name:revision`; those named in `provided` are
    left out. Ivy's own files go to the folders `work`, which is for this download alone, and
    `ivy_cache`, where it finds what an earlier one did get. Raises `DevkitError` and OSError.
    """
    ivy_jar = next(pyspark_jars_dir().glob("ivy-*.jar"), None)
    if ivy_jar is None:
        raise PysparkMissingError("Ivy is not among pyspark's jars")
    settings = _user_settings()
    if settings is None:
        settings = work / "ivysettings.xml"
        settings.write_text(_SETTINGS, encoding="utf-8")
    module_file = work / "ivy.xml"
    module_file.write_text(_module_xml(modules, provided), encoding="utf-8")
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
                if match := _STEP.match(line):
                    found, done = (found + 1, done) if match["found"] else (found, done + 1)
                    on_download(done, found, f"{match['name']}-{match['revision']}")
                elif match := _FAULT.match(line):
                    faults.append(match["module"] or line.strip())
        except BaseException:
            ivy.kill()
            raise
    if ivy.returncode != 0 or not any(content.glob("*.jar")):
        wanted = ", ".join(modules)
        reasons = "\n  ".join(list(dict.fromkeys(faults))[:_FAULT_LINES]) or "Ivy gave no reason"
        raise DownloadError(
            f"Download of {wanted} failed:\n  {reasons}",
            "Check the network. Behind an HTTP proxy set JAVA_TOOL_OPTIONS to "
            "'-Dhttps.proxyHost=HOST -Dhttps.proxyPort=PORT'; to use a mirror let "
            f"{IVY_SETTINGS_VARIABLE} name an Ivy settings file. Then run it again: "
            "it goes on where it stopped.",
        )


def _module_xml(modules: Sequence[str], provided: Collection[str]) -> str:
    """Return the description of a module that depends on what is wanted."""
    dependencies = [
        '<dependency org="{}" name="{}" rev="{}" conf="default->default"/>'.format(*name.split(":"))
        for name in modules
    ]
    dependencies += [f'<exclude module="{name}"/>' for name in sorted(provided)]
    return (
        '<ivy-module version="2.0"><info organisation="local" module="wanted"/><configurations>'
        f'<conf name="default"/></configurations><dependencies>{"".join(dependencies)}'
        "</dependencies></ivy-module>"
    )


def _user_settings() -> Path | None:
    """Return the Ivy settings file that the user named; None means the default repository."""
    named, by = os.environ.get(IVY_SETTINGS_VARIABLE), IVY_SETTINGS_VARIABLE
    if not named:
        spark_home = os.environ.get("SPARK_HOME")
        conf = os.environ.get("SPARK_CONF_DIR") or (spark_home and f"{spark_home}/conf")
        defaults = Path(conf or pyspark_jars_dir().parent / "conf") / "spark-defaults.conf"
        with contextlib.suppress(FileNotFoundError):
            match = _IVY_SETTINGS.search(defaults.read_text(encoding="utf-8"))
            named, by = match and match[1], f"spark.jars.ivySettings in {defaults}"
    if not named:
        return None
    path = Path(named.removeprefix("file://")).expanduser()
    if not path.is_file():
        raise DownloadError(
            f"There is no Ivy settings file {path}.", f"Mend {by}, which names it, or take it out."
        )
    return path
