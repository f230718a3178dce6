"""Schema migrations of the metadata store, packaged with the broker and run at start. Driver.

All that are due run in the one transaction of the connection that is handed in: they count together or not at all. A
store that a newer release has migrated is refused and left as it is.

After a change of models.py, `python -m headrace.controller.migrations "what changes"` drafts the next
`versions/vNNNN_what_changes.py` by comparing the models with a store that has all former migrations; read it, mend it.
"""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect

from headrace.core_log.errors import UnknownFormat


def upgrade(connection: Connection) -> None:
    """Bring the store behind `connection` to this release's schema, inside the transaction that is already open."""
    script = ScriptDirectory.from_config(_config(connection))
    known = [revision.revision for revision in script.walk_revisions()]
    found = MigrationContext.configure(connection).get_current_revision()
    if found is not None and found not in known:
        raise UnknownFormat(
            f"the metadata store has schema {found}, and this release knows schemas up to {known[0]}: "
            "it was written by a newer release. Nothing was touched; start that release, or restore a backup"
        )
    if found is None and inspect(connection).get_table_names():
        raise UnknownFormat("the database holds tables, but is not a metadata store. Nothing was touched")
    if found != script.get_current_head():
        command.upgrade(_config(connection), "head")


def draft(connection: Connection, message: str) -> None:
    """Write the next migration: what the models have and the store behind `connection`, once upgraded, has not."""
    upgrade(connection)
    number = 1 + sum(1 for _ in ScriptDirectory.from_config(_config(connection)).walk_revisions())
    command.revision(_config(connection), message=message, autogenerate=True, rev_id=f"{number:04}")


def _config(connection: Connection) -> Config:
    made = Config()
    made.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    made.set_main_option("file_template", "v%%(rev)s_%%(slug)s")
    made.attributes["connection"] = connection
    return made
