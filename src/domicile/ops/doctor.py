"""`domicile doctor`: the command that looks at a store, and what it shows.

Used by `cli` only. `checkup` looks; this module asks it, prints, and ends with an exit code.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from domicile.errors import ConfigError
from domicile.ops.console import (
    AWAY,
    FAILED,
    USAGE,
    App,
    AsJson,
    Cluster,
    StoreOption,
    examples,
    fail,
    find_app,
    print_json,
    which,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from domicile.ports.findings import Finding

WIDTH, WIDEST = 80, 110
LABEL = 22
_COLOURS = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def add_doctor_command(app: typer.Typer) -> None:
    """Add the command to the application."""
    dev = "sqlite:///.domicile/dev.db"
    shown = (f"doctor {dev}", "doctor --app app:node", "doctor redis://10.0.0.5:6379/0 --json")
    app.command("doctor", epilog=examples(*(f"domicile {one}" for one in shown)))(doctor)


def doctor(
    store: StoreOption = None,
    app: App = None,
    cluster: Cluster = None,
    journal: Annotated[
        str | None,
        typer.Option(show_default=False, help="The journal's URL, if the nodes name one."),
    ] = None,
    reads_only: Annotated[
        bool, typer.Option("--read-only", help="Write nothing: commits are not measured.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Look at a cluster's store: is it there, safe, fast enough, and what is in it?

    Nodes may run meanwhile. Exits with 0 if nothing is wrong or there are only warnings, 1 if
    something is, 3 if the store is away or can't be used, as with a wrong password.
    """
    from domicile import config
    from domicile.backends.registry import shown_url, store_backend
    from domicile.ops.checkup import examine
    from domicile.ports.findings import Severity

    url, name = which(store, app, cluster, "doctor")
    try:
        node = None if app is None else find_app(app)
        settings = config.from_environment() if node is None else node.settings
        if journal is None and node is not None:
            journal = node.journal
        store_backend(url)
    except ConfigError as error:
        fail(str(error), USAGE)
    findings, there = asyncio.run(examine(url, name, settings, journal, reads_only=reads_only))
    wrong = any(finding.severity is Severity.ERROR for finding in findings)
    if as_json:
        print_json(
            {
                "store": shown_url(url),
                "cluster": name,
                "findings": [
                    {
                        "severity": finding.severity.value,
                        "subject": finding.subject,
                        "said": finding.said,
                        "step": finding.step,
                    }
                    for finding in findings
                ],
            }
        )
    else:
        show_findings(shown_url(url), name, findings)
    if not there:
        raise typer.Exit(AWAY)
    if wrong:
        raise typer.Exit(FAILED)


def show_findings(url: str, cluster: str, findings: Sequence[Finding]) -> None:
    """Print findings in the order in which they were looked for, and a summary."""
    width = min(max(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH), WIDEST) - LABEL
    typer.echo(f"{url}, cluster {cluster!r}\n")
    for finding in findings:
        lines = textwrap.wrap(finding.said, width) or [""]
        if finding.step:
            lines += textwrap.wrap(f"Next: {finding.step}.", width)
        severity = f"{finding.severity.value:<7}"
        if sys.stdout.isatty():
            severity = typer.style(severity, fg=_COLOURS[finding.severity.value])
        typer.echo(f"{severity}  {finding.subject:<{LABEL - 11}}  {lines[0]}")
        for line in lines[1:]:
            typer.echo(f"{'':<{LABEL}}{line}")
    counts = [
        (sum(finding.severity.value == what for finding in findings), what)
        for what in ("error", "warning")
    ]
    said = ", ".join(f"{n} {what}{'' if n == 1 else 's'}" for n, what in counts if n)
    typer.echo(f"\n{said or 'Nothing is wrong.'}")
