"""Topics that are created by their names. Migration."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "topics",
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("stream_uuid", sa.Text(), nullable=False),
        sa.Column("partition_count", sa.Integer(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_topics_vhosts")),
        sa.PrimaryKeyConstraint("vhost", "name", name=op.f("pk_topics")),
    )
