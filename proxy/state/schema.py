"""Tell whether a SQLite file holds our state, and bring it to the newest schema."""

import sqlite3
from collections.abc import Sequence

from .errors import StateError

APPLICATION_ID = 0x4B515072
"""Marks the file as ours in its header (`PRAGMA application_id`): the letters KQPr."""

Migration = Sequence[str]
"""SQL statements that lead from one schema to the next."""

# Schema N is what the first N migrations make. Never change one that was released: add another.
# No ROWID: the table is one tree ordered by key, so a prefix is one range of it.
MIGRATIONS: Sequence[Migration] = (
    (
        "CREATE TABLE record ("
        " key TEXT NOT NULL PRIMARY KEY,"
        " version INTEGER NOT NULL,"
        " value TEXT NOT NULL"
        ") WITHOUT ROWID",
    ),
)


def identify(connection: sqlite3.Connection, path: str, newest: int = len(MIGRATIONS)) -> int:
    """Check that the file is sound and ours; return the number of its schema, 0 for an empty file.

    Changes nothing in it.

    Raises:
        StateError: it belongs to another program, was written by a newer one, or is damaged.
        sqlite3.Error: it cannot be read.

    """
    application_id = _number(connection, "PRAGMA application_id")
    schema = _number(connection, "PRAGMA user_version")
    if not (application_id or schema) and not _number(
        connection, "SELECT count(*) FROM sqlite_master"
    ):
        return 0
    if application_id != APPLICATION_ID:
        raise StateError(
            f"{path} is a database of another program", "name another file as state.path"
        )
    if schema > newest:
        raise StateError(
            f"{path} was written by a newer version of quota-proxy: its schema is {schema}, "
            f"this version knows {newest}",
            "start that version, restore a backup, or name another file as state.path",
        )
    (finding,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if finding != "ok":
        raise damaged(path, finding.splitlines()[-1])
    return schema


def migrate(
    connection: sqlite3.Connection, schema: int, migrations: Sequence[Migration] = MIGRATIONS
) -> None:
    """Bring the file from `schema` to the newest one, in one transaction.

    Raises:
        sqlite3.Error: that failed, and the file is as it was.

    """
    if schema == len(migrations):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for migration in migrations[schema:]:
            for statement in migration:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(migrations)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def damaged(path: str, finding: str) -> StateError:
    """Return the error for a file of ours that cannot be trusted."""
    return StateError(
        f"{path} is damaged: {finding}",
        "restore it from a backup, or move it away to start without the overrides and positions "
        "that it holds",
    )


def _number(connection: sqlite3.Connection, query: str) -> int:
    (value,) = connection.execute(query).fetchone()
    return int(value)
