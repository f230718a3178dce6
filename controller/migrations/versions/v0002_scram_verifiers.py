"""Users may have a SCRAM verifier beside their password hash. Migration."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("users", sa.Column("scram", sa.Text(), nullable=True))
