"""The tables that the models describe are the tables that the migrations make."""

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, MetaData, Table, Text, create_engine

from headrace.controller import migrations
from headrace.controller.models import Base


def differences(models: MetaData) -> list[object]:
    with create_engine("sqlite://").begin() as connection:
        migrations.upgrade(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        return list(compare_metadata(context, models))


def test_models_and_migrations_agree() -> None:
    assert differences(Base.metadata) == []


def test_table_without_a_migration_would_be_noticed() -> None:
    more = MetaData(naming_convention=Base.metadata.naming_convention)
    for table in Base.metadata.tables.values():
        table.to_metadata(more)
    Table("forgotten", more, Column("x", Text, primary_key=True))
    assert len(differences(more)) == 1


def test_upgrading_what_is_up_to_date_changes_nothing() -> None:
    with create_engine("sqlite://").begin() as connection:
        migrations.upgrade(connection)
        made = connection.exec_driver_sql("SELECT * FROM sqlite_master").all()
        migrations.upgrade(connection)
        assert connection.exec_driver_sql("SELECT * FROM sqlite_master").all() == made
