"""`headrace spark`: Spark on the log of a broker. Driver; docs/spark.md.

Its members are imported when they are called: most of them load Spark. Neighbours: spark_doctor.py beside it; the jobs
are in the room of Spark.
"""

import importlib

import click

MEMBERS = {
    "doctor": "headrace.commands.spark_doctor:doctor",
    **{
        name: f"headrace.commands.spark_jobs:{name}"
        for name in ("archive", "audit", "delays", "dlq", "lag", "replay", "traffic")
    },
}


class Members(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(MEMBERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MEMBERS:
            return None
        module, _, attribute = MEMBERS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group("spark", cls=Members)
def spark() -> None:
    """Read and write the log with Spark."""
