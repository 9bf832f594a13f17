"""Formats the folder in which a broker keeps its records."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from proxy.devkit import BrokerError
from proxy.devkit.settings import BrokerSettings

_FORMAT_TIMEOUT_S = 120.0


def format_storage(java: Sequence[str], settings: BrokerSettings, settings_file: Path) -> None:
    """Format the storage unless that is done; its SCRAM users are those of the formatting.

    `java` is the command up to the main class; `settings_file` holds the settings.
    Raises `BrokerError` with what Kafka said when it can't be done or takes 2 minutes, and OSError.
    """
    # Kafka writes this file last, so a storage without it is formatted only in part.
    if (settings.storage_dir / "meta.properties").exists():
        return
    scram = [
        argument
        for name, password in settings.sasl_users.items()
        for argument in ("--add-scram", f"SCRAM-SHA-256=[name={name},password={password}]")
    ]
    command = [
        *(*java, "kafka.tools.StorageTool", "format", "--ignore-formatted"),
        *("-t", settings.quorum.cluster_id, "-c", str(settings_file), *scram),
    ]
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_FORMAT_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise BrokerError(
            f"Formatting the storage in {settings.storage_dir} took over {_FORMAT_TIMEOUT_S:g} s.",
            "Start it again when the machine is less loaded.",
        ) from error
    except subprocess.CalledProcessError as error:
        raise BrokerError(
            f"The storage in {settings.storage_dir} can't be formatted:\n{error.stdout.strip()}",
            "Choose another folder, or mend the server properties that you gave.",
        ) from error
