"""The tables of the metadata store. Format (SQLAlchemy declarative); the same on SQLite and on PostgreSQL.

Keys are natural, so that a row says what it is about; a binding's arguments enter its key as a digest, since a database
key cannot be long. Names compare byte by byte (SQLite's BINARY; a PostgreSQL database needs collation C for that).
Every change of these tables needs a migration (migrations/); a test compares the two.
"""

from typing import ClassVar

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

# What a running broker must understand to touch the rows, beyond the shape of the tables; moves when the meaning of a
# column does. A store with a higher one is refused.
FORMAT = 1


class Base(DeclarativeBase):
    # Named constraints, so that a migration can name what it drops.
    metadata = MetaData(
        naming_convention={
            "pk": "pk_%(table_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
        }
    )
    type_annotation_map: ClassVar = {str: Text, int: Integer, bool: Boolean}


class ClusterRow(Base):
    """One row. Every transaction begins by moving its version, and thereby waits for all others."""

    __tablename__ = "cluster"
    __table_args__ = (CheckConstraint("id = 1", name="single_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    cluster_uuid: Mapped[str]
    metadata_version: Mapped[int] = mapped_column(BigInteger)
    # Which transaction wrote this version: tells, after a lost answer, whether it was ours.
    last_txn: Mapped[str]
    format: Mapped[int]
    next_view_id: Mapped[int] = mapped_column(BigInteger)
    # Who was chosen controller last, in which of its lives, and how often that was renewed.
    controller_epoch: Mapped[int] = mapped_column(BigInteger, server_default="0")
    controller_incarnation: Mapped[int] = mapped_column(BigInteger, server_default="0")
    controller_node: Mapped[int] = mapped_column(server_default="0")
    lease_token: Mapped[int] = mapped_column(BigInteger, server_default="0")


class VhostRow(Base):
    __tablename__ = "vhosts"

    name: Mapped[str] = mapped_column(primary_key=True)
    shard: Mapped[int] = mapped_column(server_default="0")


class UserRow(Base):
    __tablename__ = "users"

    name: Mapped[str] = mapped_column(primary_key=True)
    password_hash: Mapped[str]
    # JSON array of text.
    tags: Mapped[str]
    version: Mapped[int] = mapped_column(BigInteger)
    scram: Mapped[str | None]


class PermissionRow(Base):
    __tablename__ = "permissions"

    user: Mapped[str] = mapped_column(ForeignKey("users.name"), primary_key=True)
    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True, index=True)
    configure: Mapped[str]
    write: Mapped[str]
    read: Mapped[str]


class TopicPermissionRow(Base):
    """The exchange need not exist: rights may be given before it is declared."""

    __tablename__ = "topic_permissions"

    user: Mapped[str] = mapped_column(ForeignKey("users.name"), primary_key=True)
    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True, index=True)
    exchange: Mapped[str] = mapped_column(primary_key=True)
    write: Mapped[str]
    read: Mapped[str]


class ExchangeRow(Base):
    __tablename__ = "exchanges"

    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    stream_uuid: Mapped[str]
    auto_delete: Mapped[bool]
    internal: Mapped[bool]
    # A field table in the text form of table.py.
    arguments: Mapped[str]


class QueueRow(Base):
    __tablename__ = "queues"

    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    view_id: Mapped[int] = mapped_column(BigInteger, unique=True)
    stream_uuid: Mapped[str]
    owner: Mapped[str]
    auto_delete: Mapped[bool]
    arguments: Mapped[str]


class BindingRow(Base):
    __tablename__ = "bindings"
    __table_args__ = (
        ForeignKeyConstraint(["vhost", "source"], ["exchanges.vhost", "exchanges.name"]),
        Index(None, "vhost", "destination_kind", "destination"),
    )

    vhost: Mapped[str] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    destination_kind: Mapped[str] = mapped_column(primary_key=True)
    destination: Mapped[str] = mapped_column(primary_key=True)
    routing_key: Mapped[str] = mapped_column(primary_key=True)
    arguments_digest: Mapped[str] = mapped_column(primary_key=True)
    arguments: Mapped[str]


class TopicRow(Base):
    __tablename__ = "topics"

    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    stream_uuid: Mapped[str]
    partition_count: Mapped[int]
    # A field table in the text form of table.py.
    settings: Mapped[str]


class PolicyRow(Base):
    __tablename__ = "policies"

    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    pattern: Mapped[str]
    apply_to: Mapped[str]
    # A field table in the text form of table.py.
    definition: Mapped[str]
    priority: Mapped[int]


class VhostLimitsRow(Base):
    """NULL = no limit."""

    __tablename__ = "vhost_limits"

    vhost: Mapped[str] = mapped_column(ForeignKey("vhosts.name"), primary_key=True)
    connections_max: Mapped[int | None]
    queues_max: Mapped[int | None]


class UserLimitsRow(Base):
    """NULL = no limit."""

    __tablename__ = "user_limits"

    user: Mapped[str] = mapped_column(ForeignKey("users.name"), primary_key=True)
    connections_max: Mapped[int | None]
    channels_max: Mapped[int | None]


class NodeRow(Base):
    """The nodes of a cluster."""

    __tablename__ = "nodes"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    incarnation: Mapped[int] = mapped_column(BigInteger)
    disk_uuid: Mapped[str]
    state: Mapped[str]
    # JSON: [[door, [host, port]], ...].
    endpoints: Mapped[str]
    clean: Mapped[bool]


class ShardRow(Base):
    """Who has which vhosts' streams. Only the controller of a cluster writes here."""

    __tablename__ = "shards"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # For whoever looks at the table; what counts is in `assignment`.
    leader: Mapped[int]
    epoch: Mapped[int] = mapped_column(BigInteger)
    # JSON of core_log/replication/assignment.py.
    assignment: Mapped[str]
    # JSON array of nodes.
    target: Mapped[str]
    forced_epoch: Mapped[int] = mapped_column(BigInteger)


class MetadataLogRow(Base):
    """The change feed: one row per version, in the form of changes.py. Trimmed from below."""

    __tablename__ = "metadata_log"

    version: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    change: Mapped[str]
