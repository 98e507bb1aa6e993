"""Commands for controller rings on Kubernetes: `domicile ring install | sharder | status`.

The command line adds them. They parse, call `domicile.kube`, and print. What needs the extra
`domicile[kubernetes]` is imported inside the commands.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from domicile.errors import ConfigError, DomicileError
from domicile.ops.console import (
    AWAY,
    FAILED,
    INTERRUPTED,
    USAGE,
    AsJson,
    FormName,
    Http,
    LevelName,
    LogFormat,
    LogLevel,
    examples,
    fail,
    print_json,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from domicile.kube.conventions import GroupResource
    from domicile.kubeapi.client import KubeClient
    from domicile.kubeapi.kinds import AnyApiKind
    from domicile.kubeapi.objects import ControllerRing, ObjectMeta

REFRESH_S = 2.0

NAMESPACE = "sharding-system"

Kubeconfig = Annotated[
    str | None,
    typer.Option(show_default=False, help="The kubeconfig, if not the pod's or KUBECONFIG."),
]
KubeContext = Annotated[
    str | None, typer.Option("--context", show_default=False, help="A context of the kubeconfig.")
]


def add_ring_commands(app: typer.Typer) -> None:
    """Add these commands to the application."""
    group = typer.Typer(
        no_args_is_help=True, help="Share the objects of Kubernetes controllers among instances."
    )
    for name, command, shown in (
        ("install", install, ("install --resource example.com/websites > sharder.yaml",)),
        ("sharder", sharder, ("sharder --url https://10.0.0.5:9443",)),
        ("status", show_ring, ("status websites", "status websites --watch")),
    ):
        epilog = examples(*(f"domicile ring {example}" for example in shown))
        group.command(name, epilog=epilog)(command)
    app.add_typer(group, name="ring")


def install(
    resource: Annotated[
        list[str] | None,
        typer.Option(
            help="GROUP/RESOURCE of a ring, or /RESOURCE of the core group; the sharder gets the "
            "right to list and label it. Repeat it for each.",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Where the sharder runs.")] = NAMESPACE,
    image: Annotated[
        str, typer.Option(help="An image with domicile[cli,kubernetes] in it.")
    ] = "domicile:latest",
    replicas: Annotated[int, typer.Option(min=1, help="How many sharders run; one acts.")] = 2,
) -> None:
    """Print what a cluster needs for the sharder, as YAML for `kubectl apply -f -`."""
    try:
        from domicile.ops.kubernetes import yaml_of
        from domicile.ops.ring_manifests import install_manifests
    except (ImportError, ConfigError):
        fail("this needs more packages: pip install 'domicile[kubernetes]'", USAGE)
    found = install_manifests(
        namespace, image, replicas, [_resource(one) for one in resource or ()]
    )
    typer.echo(yaml_of(found))


def sharder(
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    in_cluster: Annotated[
        bool, typer.Option("--in-cluster", help="Take the pod's own account, whatever is set.")
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(show_default=False, help="Of its Lease and Secret; else POD_NAMESPACE."),
    ] = None,
    listen: Annotated[str, typer.Option(help="Where the webhook listens.")] = "127.0.0.1:9443",
    service: Annotated[
        str | None, typer.Option(show_default=False, help="The Service that leads to it.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(show_default=False, help="The URL that leads to it, without a Service."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(show_default=False, help="A certificate that others renew.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(show_default=False, help="Its key.")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(show_default=False, help="What the API server has to trust.")
    ] = None,
    drain_deadline: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds until an instance that keeps one is named."),
    ] = 60.0,
    http: Http = None,
    log_level: LogLevel = LevelName.info,
    log_format: LogFormat = FormName.text,
) -> None:
    """Run a sharder until SIGTERM or Ctrl-C. Several may run: one acts, all answer the webhook.

    Without --tls-cert it makes certificates in a Secret that all sharders share. Exits with 0 once
    it has left, 1 after an error, 2 if an option is wrong, 3 if the API server is away.
    """
    from domicile.ops import logs

    logs.set_up(log_level.value, log_format.value)
    if (service is None) == (url is None):
        fail("say either --service or --url: how does the API server reach the webhook?", USAGE)
    files = (tls_cert, tls_key, tls_ca)
    if any(files) and not all(files):
        fail("--tls-cert, --tls-key and --tls-ca belong together", USAGE)
    try:
        asyncio.run(
            _sharder(kubeconfig, context, in_cluster, namespace, listen, service, url, files,
                     drain_deadline, http)
        )  # fmt: skip
    except DomicileError as error:
        _fail(error)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)


async def _sharder(
    kubeconfig: str | None,
    context: str | None,
    in_cluster: bool,
    namespace: str | None,
    listen: str,
    service: str | None,
    url: str | None,
    files: tuple[Path | None, Path | None, Path | None],
    drain_deadline_s: float,
    http: str | None,
) -> None:
    from urllib.parse import urlsplit

    from domicile.kube.certificates import (
        WebhookCertificates,
        certificates_from_files,
        shared_certificates,
    )
    from domicile.kube.serving import ServedSharder, SharderOptions
    from domicile.kubeapi.client import KubeClient
    from domicile.kubeapi.credentials import find_credentials, of_pod
    from domicile.kubeapi.http_exchange import HttpExchange
    from domicile.membership.clock import SystemClock
    from domicile.observe.http import split_address

    found = of_pod() if in_cluster else find_credentials(kubeconfig, context)
    where = namespace or os.environ.get("POD_NAMESPACE") or found.namespace
    host, port = split_address(listen)
    names = (
        [f"{service}.{where}.svc", f"{service}.{where}.svc.cluster.local"]
        if service
        else [urlsplit(url or "").hostname or host]
    )
    async with KubeClient(HttpExchange(found), account=found.account) as client:

        async def certificates() -> WebhookCertificates:
            certificate, key, authority = files
            if certificate and key and authority:
                return certificates_from_files(certificate, key, authority)
            return await shared_certificates(client, where, names, SystemClock().wall())

        served = ServedSharder(
            client,
            SharderOptions(
                namespace=where,
                identity=os.environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}",
                certificates=certificates,
                host=host,
                port=port,
                service=service or "",
                url=url or "",
                http=http or "",
                drain_deadline_s=drain_deadline_s,
            ),
        )
        loop = asyncio.get_running_loop()
        running = asyncio.ensure_future(served.run())
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, running.cancel)
        try:
            await running
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
        except BaseExceptionGroup as errors:
            raise _first_of(errors) from errors
        finally:
            for name in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(name)


def show_ring(
    ring: Annotated[str, typer.Argument(metavar="NAME", help="The ring's name.")],
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every 2 s.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a ring's instances with their states and objects, objects that have to be let go of, and
    objects without an instance.

    It lists the metadata of all objects of the ring. Exits with 1 if an object has no instance or
    an instance is not ready, 3 if the API server is away.
    """

    async def show() -> bool:
        from domicile.kubeapi.http_exchange import connect_to_kubernetes
        from domicile.ops.show import ViewPrinter

        client, _ = connect_to_kubernetes(kubeconfig, context)
        async with client:
            with ViewPrinter(watch and not as_json) as shown:
                while True:
                    seen = await look_at_ring(client, ring, now=time.time())
                    if as_json:
                        print_json(seen)
                    else:
                        shown.show(ring_view(seen))
                    if not watch:
                        return bool(seen["well"])
                    await asyncio.sleep(REFRESH_S)

    try:
        well = asyncio.run(show())
    except DomicileError as error:
        _fail(error)
    except KeyboardInterrupt:
        fail("interrupted", INTERRUPTED)
    if not well:
        raise typer.Exit(FAILED)


async def look_at_ring(client: KubeClient, name: str, *, now: float = 0.0) -> dict[str, Any]:
    """A ring as the API server shows it. States are the sharder's own, from the Leases' labels.

    With the time of day, `now`, it also says for how long objects have been asked for.
    """
    from contextlib import aclosing

    from domicile.kube.admission import key_of, role_in
    from domicile.kube.conventions import (
        RING_LABEL,
        STATE_LABEL,
        GroupResource,
        drain_label,
        shard_label,
    )
    from domicile.kube.sharding import default_namespaces, labels_of_namespace
    from domicile.kubeapi.kinds import LEASES, NAMESPACES

    ring = await _ring_called(client, name)
    selector = ring.spec.namespace_selector or default_namespaces(await _sharder_lives_in(client))
    meant = [
        one.metadata.name
        for one in (await client.list(NAMESPACES)).items
        if selector.matches(labels_of_namespace(one))
    ]
    leases = await client.list(LEASES, labels=f"{RING_LABEL}={name}")
    instances = {
        one.metadata.name: {
            "state": one.metadata.label(STATE_LABEL) or "new",
            "holder": one.spec.holder_identity or "",
            "objects": 0,
        }
        for one in leases.items
    }
    unassigned: list[str] = []
    draining: list[dict[str, Any]] = []
    without = waiting = 0
    shard, drain = shard_label(name), drain_label(name)
    resources: dict[GroupResource, None] = {}
    for resource in ring.spec.resources:
        resources[GroupResource(resource.group, resource.resource)] = None
        for controlled in resource.controlled_resources:
            resources[GroupResource(controlled.group, controlled.resource)] = None
    for one in resources:
        kind = await client.discover(one.group, one.resource)
        async with aclosing(client.stream_metadata(kind)) as objects:
            async for found in objects:
                metadata = found.metadata
                shown = f"{one} {metadata.namespace}/{metadata.name}".replace(" /", " ")
                instance = metadata.label(shard)
                if metadata.namespace and metadata.namespace not in meant:
                    continue
                if instance in instances:
                    instances[instance]["objects"] += 1  # type: ignore[operator]
                elif instance or key_of(
                    role_in(ring.spec, one), kind.group, kind.kind, metadata.namespace,
                    metadata.name, metadata,
                ):  # fmt: skip
                    without += 1
                    if len(unassigned) < 20:
                        unassigned.append(shown)
                if metadata.has_label(drain):
                    waiting += 1
                    if len(draining) < 20:
                        age_s = await _asked_for_s(client, kind, metadata, drain, now)
                        draining.append({"object": shown, "instance": instance, "age_s": age_s})
    well = not without and all(one["state"] == "ready" for one in instances.values())
    return {
        "ring": name,
        "conditions": [
            {"type": one.type, "status": one.status, "reason": one.reason, "message": one.message}
            for one in ring.status.conditions
        ],
        "instances": dict(sorted(instances.items())),
        "draining": draining,
        "draining_count": waiting,
        "unassigned": unassigned,
        "unassigned_count": without,
        "well": well,
    }


async def _sharder_lives_in(client: KubeClient) -> str:
    """The sharder's namespace, in which it leaves objects alone: that of its own Lease."""
    from domicile.kube.sharding import LEADER, LEADER_LABEL
    from domicile.kubeapi.kinds import LEASES

    labels = ",".join(f"{name}={value}" for name, value in LEADER_LABEL.items())
    found = [one.metadata for one in (await client.list(LEASES, labels=labels)).items]
    return next((one.namespace for one in found if one.name == LEADER), NAMESPACE)


async def _ring_called(client: KubeClient, name: str) -> ControllerRing:
    from domicile.kubeapi.errors import KubeNotFound
    from domicile.kubeapi.kinds import RINGS

    try:
        return await client.get(RINGS, name)
    except KubeNotFound as error:
        try:
            known = [one.metadata.name for one in (await client.list(RINGS)).items]
        except KubeNotFound:
            raise ConfigError(
                "this cluster does not know the kind ControllerRing: apply what `domicile ring "
                "install` prints"
            ) from error
        listed = f"there are: {', '.join(sorted(known))}" if known else "there is none yet"
        raise ConfigError(
            f"there is no ControllerRing {name!r}; {listed}. Name one of them, or make it with "
            "kubectl apply"
        ) from error


async def _asked_for_s(
    client: KubeClient, kind: AnyApiKind, metadata: ObjectMeta, drain: str, now: float
) -> float | None:
    """Seconds since an object got its drain label, by the API server's notes; None: unknown."""
    from datetime import datetime

    from domicile.kubeapi.errors import KubeError
    from domicile.kubeapi.objects import WrittenObject

    written = replace(kind, type=WrittenObject)
    try:
        found = await client.get(written, metadata.name, metadata.namespace)
        return max(0.0, now - datetime.fromisoformat(found.metadata.labelled_at(drain)).timestamp())
    except (KubeError, ValueError):
        return None  # the object is gone by now, or nobody noted it


def ring_view(seen: dict[str, Any]) -> RenderableType:
    """A ring for people, at any width."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from domicile.ops.show import age_text

    lines = [
        f"{one['type']}: {one['status']} ({one['reason']}) {one['message']}".rstrip()
        for one in seen["conditions"]
    ]
    instances = Table(box=None, pad_edge=False)
    instances.add_column("instance", overflow="fold")
    instances.add_column("state")
    instances.add_column("objects", justify="right")
    for name, one in seen["instances"].items():
        style = "" if one["state"] == "ready" else "yellow"
        instances.add_row(name, Text(one["state"], style), str(one["objects"]))
    if not seen["instances"]:
        lines.append("no instance: start a controller that takes part in this ring")
    rest = [f"to let go of: {seen['draining_count']}"]
    for one in seen["draining"]:
        age = "" if one["age_s"] is None else f", for {age_text(one['age_s'])}"
        rest.append(f"  {one['object']} at {one['instance']}{age}")
    rest.append(f"without an instance: {seen['unassigned_count']}")
    rest += [f"  {shown}" for shown in seen["unassigned"]]
    return Group(Text("\n".join(lines)), instances, Text("\n".join(rest)))


def _resource(text: str) -> GroupResource:
    from domicile.kube.conventions import GroupResource

    group, slash, resource = text.rpartition("/")
    if not slash or not resource:
        fail(f"--resource {text!r} is not GROUP/RESOURCE, as in example.com/websites", USAGE)
    return GroupResource(group, resource)


def _first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error that has a message for people; else all of them."""
    found: BaseException | None = errors.subgroup(DomicileError)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return errors if found is None else found


def _fail(error: DomicileError) -> NoReturn:
    from domicile.kubeapi.errors import KubeUnanswered, KubeUnavailable

    if isinstance(error, KubeUnavailable | KubeUnanswered):
        fail(f"{error}; see that --kubeconfig or KUBECONFIG names the right server", AWAY)
    fail(str(error), USAGE if isinstance(error, ConfigError) else FAILED)
