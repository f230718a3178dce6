"""How Alembic reaches the store: on the connection, and in the transaction, that the caller has opened. Driver."""

from alembic import context

from headrace.controller.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite changes a table by copying it.
    render_as_batch=True,
)
context.run_migrations()
