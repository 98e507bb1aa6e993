"""Commands for programs with entities on Kubernetes: `domicile kubernetes manifests`.

The command line adds them. They parse and print; `entity_manifests` says what.
"""

from __future__ import annotations

from enum import Enum
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from domicile.errors import ConfigError
from domicile.ops.console import USAGE, examples, fail
from domicile.ops.entity_manifests import EntityProgram, entity_manifests


class WorkloadName(Enum):
    """What keeps the pods running."""

    deployment = "Deployment"
    statefulset = "StatefulSet"


def add_kubernetes_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    group = typer.Typer(no_args_is_help=True, help="Run nodes of entities on Kubernetes.")

    @group.callback()
    def kubernetes() -> None:  # pyright: ignore[reportUnusedFunction]
        """Run nodes of entities on Kubernetes."""

    line = "domicile kubernetes manifests shop --app shop.main:node --image registry/shop:2.1.0"
    group.command("manifests", epilog=examples(f"{line} --store etcd://etcd:2379 > shop.yaml"))(
        manifests
    )
    app.add_typer(group, name="kubernetes")


def manifests(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of all that is made.")],
    target: Annotated[
        str, typer.Option("--app", help="MODULE:NAME of the node, as `domicile run` takes it.")
    ],
    image: Annotated[str, typer.Option(help="An image with the program in it.")],
    store: Annotated[str, typer.Option(help="The URL of a store that all pods reach.")],
    namespace: Annotated[str, typer.Option(help="Where it runs.")] = "default",
    version: Annotated[
        str,
        typer.Option(help="The program's version: while versions are mixed, the newest receives."),
    ] = "",
    replicas: Annotated[int, typer.Option(min=1, help="How many nodes.")] = 3,
    workload: Annotated[
        WorkloadName, typer.Option(help="What keeps the pods running.")
    ] = WorkloadName.deployment,
) -> None:
    """Print what a program with entities needs, as YAML for `kubectl apply -f -`."""
    from domicile.backends.registry import shown_url, store_backend
    from domicile.kubeapi.objects import is_object_name

    if find_spec("yaml") is None:
        fail("this needs more packages: pip install 'domicile[kubernetes]'", USAGE)
    if not is_object_name(name) or "." in name:
        fail(f"{name!r} can't be the name of a Service: use a-z, 0-9 and -", USAGE)
    try:
        reach = store_backend(store).reach
    except ConfigError as error:
        fail(str(error), USAGE)
    if reach != "network":
        fail(
            f"{store} serves one {reach}, and pods run on several machines: use a store with a "
            "server, as etcd://etcd:2379",
            USAGE,
        )
    if shown_url(store) != store:
        typer.echo(
            "warning: the store's URL contains options or a password, which the manifests would "
            "show; put it into the Secret, and DOMICILE_STORE as that of DOMICILE_TOKEN",
            err=True,
        )
    program = EntityProgram(
        name, target, image, store, namespace, version, replicas, workload.value
    )
    try:
        found = entity_manifests(program)
    except ConfigError as error:
        fail(str(error), USAGE)
    typer.echo(yaml_of(found))


def yaml_of(manifests: list[dict[str, Any]]) -> str:
    """Several manifests as one YAML text without anchors, which people find hard to read."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump_all(manifests, Dumper=Plain, sort_keys=False).rstrip()
