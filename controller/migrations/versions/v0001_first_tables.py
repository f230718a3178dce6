"""The first tables: cluster row, rights, topology, policies, limits, change feed. Migration."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "cluster",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("cluster_uuid", sa.Text(), nullable=False),
        sa.Column("metadata_version", sa.BigInteger(), nullable=False),
        sa.Column("last_txn", sa.Text(), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("next_view_id", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_cluster_single_row")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cluster")),
    )
    op.create_table(
        "metadata_log",
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("change", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_metadata_log")),
    )
    op.create_table(
        "users",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("password_hash", sa.Text(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_users")),
    )
    op.create_table(
        "vhosts", sa.Column("name", sa.Text(), nullable=False), sa.PrimaryKeyConstraint("name", name=op.f("pk_vhosts"))
    )
    op.create_table(
        "exchanges",
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("stream_uuid", sa.Text(), nullable=False),
        sa.Column("auto_delete", sa.Boolean(), nullable=False),
        sa.Column("internal", sa.Boolean(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_exchanges_vhosts")),
        sa.PrimaryKeyConstraint("vhost", "name", name=op.f("pk_exchanges")),
    )
    op.create_table(
        "permissions",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("configure", sa.Text(), nullable=False),
        sa.Column("write", sa.Text(), nullable=False),
        sa.Column("read", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_permissions_users")),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_permissions_vhosts")),
        sa.PrimaryKeyConstraint("user", "vhost", name=op.f("pk_permissions")),
    )
    op.create_index(op.f("ix_permissions_vhost"), "permissions", ["vhost"])

    op.create_table(
        "policies",
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("pattern", sa.Text(), nullable=False),
        sa.Column("apply_to", sa.Text(), nullable=False),
        sa.Column("definition", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_policies_vhosts")),
        sa.PrimaryKeyConstraint("vhost", "name", name=op.f("pk_policies")),
    )
    op.create_table(
        "queues",
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("view_id", sa.BigInteger(), nullable=False),
        sa.Column("stream_uuid", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("auto_delete", sa.Boolean(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_queues_vhosts")),
        sa.PrimaryKeyConstraint("vhost", "name", name=op.f("pk_queues")),
        sa.UniqueConstraint("view_id", name=op.f("uq_queues_view_id")),
    )
    op.create_table(
        "topic_permissions",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("exchange", sa.Text(), nullable=False),
        sa.Column("write", sa.Text(), nullable=False),
        sa.Column("read", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_topic_permissions_users")),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_topic_permissions_vhosts")),
        sa.PrimaryKeyConstraint("user", "vhost", "exchange", name=op.f("pk_topic_permissions")),
    )
    op.create_index(op.f("ix_topic_permissions_vhost"), "topic_permissions", ["vhost"])

    op.create_table(
        "user_limits",
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("connections_max", sa.Integer(), nullable=True),
        sa.Column("channels_max", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["user"], ["users.name"], name=op.f("fk_user_limits_users")),
        sa.PrimaryKeyConstraint("user", name=op.f("pk_user_limits")),
    )
    op.create_table(
        "vhost_limits",
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("connections_max", sa.Integer(), nullable=True),
        sa.Column("queues_max", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["vhost"], ["vhosts.name"], name=op.f("fk_vhost_limits_vhosts")),
        sa.PrimaryKeyConstraint("vhost", name=op.f("pk_vhost_limits")),
    )
    op.create_table(
        "bindings",
        sa.Column("vhost", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("destination_kind", sa.Text(), nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("routing_key", sa.Text(), nullable=False),
        sa.Column("arguments_digest", sa.Text(), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["vhost", "source"], ["exchanges.vhost", "exchanges.name"], name=op.f("fk_bindings_exchanges")
        ),
        sa.PrimaryKeyConstraint(
            "vhost",
            "source",
            "destination_kind",
            "destination",
            "routing_key",
            "arguments_digest",
            name=op.f("pk_bindings"),
        ),
    )
    op.create_index(
        op.f("ix_bindings_vhost_destination_kind_destination"), "bindings", ["vhost", "destination_kind", "destination"]
    )
