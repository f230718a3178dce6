"""Nodes of a cluster, and the shards that they lead and follow. Migration."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("incarnation", sa.BigInteger(), nullable=False),
        sa.Column("disk_uuid", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("endpoints", sa.Text(), nullable=False),
        sa.Column("clean", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "shards",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("leader", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("assignment", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("forced_epoch", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_shards")),
    )
    if op.get_bind().dialect.name == "postgresql":
        # Its one row is updated with every renewal of the lease: in place, as long as there is room on its page.
        op.execute("ALTER TABLE cluster SET (fillfactor = 50)")
    with op.batch_alter_table("vhosts") as table:
        table.add_column(sa.Column("shard", sa.Integer(), server_default="0", nullable=False))
