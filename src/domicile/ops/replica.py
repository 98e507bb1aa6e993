"""The command group `domicile replica`: servers of replica groups."""

from __future__ import annotations

import typer

from domicile.ops.replica_run import add_run


def add_replica_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    group = typer.Typer(
        no_args_is_help=True, help="Keep one primary in a group of replicated databases."
    )
    add_run(group)
    app.add_typer(group, name="replica")
