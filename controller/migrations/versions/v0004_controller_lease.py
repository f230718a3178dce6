"""Who is the controller, and for how long: the lease. Migration."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    with op.batch_alter_table("cluster") as table:
        for name in ("controller_epoch", "controller_incarnation", "lease_token"):
            table.add_column(sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
        table.add_column(sa.Column("controller_node", sa.Integer(), server_default="0", nullable=False))
