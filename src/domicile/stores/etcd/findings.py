"""What `domicile doctor` reports about an etcd cluster.

Only `domicile.stores.etcd.store` uses it. It judges what the members said; it asks nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from domicile.ports.findings import Finding, Severity
from domicile.stores.etcd import rpc_pb2 as pb
from domicile.stores.etcd.address import EtcdAddress

OLDEST = (3, 4)
SAVES_FIRST = (3, 5, 5)
"""From here on a cluster of one member saves a write before it acknowledges it."""

USUAL_QUOTA_BYTES = 2 * 2**30
"""What a member may store unless it was told otherwise; those before 3.6 do not say their limit."""

FULL = 0.8
"""The part of the quota in use from which a warning is given."""

HALF_FREE = 0.5
LEAST_BYTES = 64 * 2**20
"""Free space inside the database that is worth a note: this part of it, and as much."""

ALARMS = {1: "NOSPACE", 2: "CORRUPT"}


class EtcdMemberSaid(NamedTuple):
    """One server of the URL: its status, or why it gave none."""

    endpoint: str
    status: pb.StatusResponse | None
    why: str = ""


class EtcdSurvey(NamedTuple):
    """What the servers of a URL said."""

    address: EtcdAddress
    servers: Sequence[EtcdMemberSaid]
    members: Sequence[pb.Member]
    """All members, by the list of one that answered; empty: none would tell."""
    alarms: Sequence[tuple[int, int]] | None
    """The member and the kind of each; None: none would tell."""
    auth: bool | None
    """Whether etcd asks for a login; None: nobody could see it."""
    oldest: int
    """The oldest revision whose changes are kept; 0: not known."""


def cluster_findings(survey: EtcdSurvey) -> list[Finding]:
    """Judge an etcd cluster."""
    said = [server.status for server in survey.servers if server.status is not None]
    return [
        *_members(survey, said), *_versions(survey, said), *_leader(said), *_alarms(survey),
        *_space(said), *_access(survey), *_history(survey, said),
    ]  # fmt: skip


def _members(survey: EtcdSurvey, said: Sequence[pb.StatusResponse]) -> list[Finding]:
    found = [
        Finding(
            Severity.WARNING, "members", f"{server.endpoint} gives no status: {server.why}",
            "see that it runs and is still a member, as `etcdctl member list` says",
        )
        for server in survey.servers
        if server.status is None
    ]  # fmt: skip
    voters = [member for member in survey.members if not member.isLearner]
    if not voters and not said:
        return found
    if not voters:
        step = "ask as a user who may call `etcdctl member list`"
        return [*found, Finding(Severity.NOTE, "members", "no member tells who they are", step)]
    most, here = len(voters) // 2 + 1, {status.header.member_id for status in said}
    count = f"{len(voters)} member{'' if len(voters) == 1 else 's'}"
    bear = len(voters) - most
    text = f"{count}; the store goes on without {bear} of them"
    if len(voters) == 1:
        step = "run three members, where a failure of one must not stop the cluster"
        found.append(Finding(Severity.NOTE, "members", text, step))
    elif not bear or len(voters) % 2 == 0:
        text += f", as with {len(voters) - 1}"
        found.append(Finding(Severity.NOTE, "members", text, "run an odd number of members"))
    else:
        found.append(Finding(Severity.OK, "members", text))
    unnamed = sorted(one.name or f"{one.ID:x}" for one in voters if one.ID not in here)
    if unnamed and len(said) == len(survey.servers):
        found.append(
            Finding(
                Severity.WARNING, "members",
                f"the URL does not name {', '.join(unnamed)}: processes never ask there",
                "name all members in the URL, or names in DNS that follow them",
            )
        )  # fmt: skip
    gone = {member.ID for member in survey.members}
    for server in survey.servers:
        status = server.status
        if status is not None and status.header.member_id not in gone:
            text = f"{server.endpoint} is no member of the cluster of the others"
            step = "name servers of one etcd cluster only"
            found.append(Finding(Severity.ERROR, "members", text, step))
    return found


def _versions(survey: EtcdSurvey, said: Sequence[pb.StatusResponse]) -> list[Finding]:
    versions = sorted({status.version for status in said}, key=_numbers)
    if not versions:
        return []
    text = f"etcd {', '.join(versions)}"
    if _numbers(versions[0]) < OLDEST:
        return [Finding(Severity.ERROR, "version", text, "use etcd 3.4 or newer")]
    if _numbers(versions[0]) < SAVES_FIRST and len(survey.members) == 1:
        return [
            Finding(
                Severity.WARNING, "version",
                f"{text}, one member: it acknowledges a write before it has saved it, and a crash "
                "may lose it (etcd's issue 14370)", "use 3.5.5 or newer, or three members",
            )
        ]  # fmt: skip
    if len(versions) > 1:
        step = "bring all members to one version"
        return [Finding(Severity.NOTE, "version", text, step)]
    return [Finding(Severity.OK, "version", text)]


def _leader(said: Sequence[pb.StatusResponse]) -> list[Finding]:
    leaders = {status.leader for status in said}
    if 0 in leaders:
        return [
            Finding(
                Severity.ERROR, "leader", "a member knows no leader: nothing can be decided there",
                "see that most members run and reach each other: "
                "`etcdctl endpoint status --cluster`",
            )
        ]  # fmt: skip
    if len({status.header.cluster_id for status in said}) > 1:
        return []
    if len(leaders) > 1:
        said_so = "members name different leaders"
        step = "ask again; if it lasts, look at the network between them"
        return [Finding(Severity.WARNING, "leader", said_so, step)]
    return [Finding(Severity.OK, "leader", f"member {leader:x} leads") for leader in leaders]


def _alarms(survey: EtcdSurvey) -> list[Finding]:
    if survey.alarms is None:
        return []
    found: list[Finding] = []
    for member, kind in survey.alarms:
        name = ALARMS.get(kind, str(kind))
        step = (
            "compact and defragment it, or raise --quota-backend-bytes, then run "
            "`etcdctl alarm disarm`"
            if name == "NOSPACE"
            else "replace the data of that member, as etcd's page about data corruption says"
        )
        said = f"alarm {name} of member {member:x}"
        said += ": nothing can be written" if name == "NOSPACE" else ": its data differs"
        found.append(Finding(Severity.ERROR, "alarms", said, step))
    return found or [Finding(Severity.OK, "alarms", "none")]


def _space(said: Sequence[pb.StatusResponse]) -> list[Finding]:
    if not said:
        return []
    worst = max(said, key=lambda status: status.dbSize)
    quota = worst.dbSizeQuota or USUAL_QUOTA_BYTES
    known = "" if worst.dbSizeQuota else ", the usual limit; this version does not tell its own"
    text = f"{_mib(worst.dbSize)} of {_mib(quota)} used{known}"
    if worst.dbSize > quota * FULL:
        step = "compact and defragment it, or raise --quota-backend-bytes: writes fail when full"
        return [Finding(Severity.WARNING, "space", text, step)]
    free = worst.dbSize - worst.dbSizeInUse
    if free > max(worst.dbSize * HALF_FREE, LEAST_BYTES):
        text += f"; {_mib(free)} of it are free inside the file"
        return [Finding(Severity.NOTE, "space", text, "`etcdctl defrag`, one member at a time")]
    return [Finding(Severity.OK, "space", text)]


def _access(survey: EtcdSurvey) -> list[Finding]:
    address = survey.address
    found: list[Finding] = []
    if address.tls:
        found.append(Finding(Severity.OK, "access", "TLS"))
    else:
        step = "name the authority of etcd's certificates as ?ca=, unless the network is private"
        found.append(Finding(Severity.NOTE, "access", "no TLS: nothing is encrypted", step))
    if survey.auth is None:
        return found
    if not address.user:
        said = "no login: every process that reaches etcd may write"
        step = "give nodes a user with few rights, as in the page about etcd"
        found.append(Finding(Severity.NOTE, "access", said, step))
    elif not survey.auth:
        said = f"the URL has user {address.user!r}, and etcd asks nobody for a login"
        found.append(Finding(Severity.WARNING, "access", said, "`etcdctl auth enable`"))
    else:
        found.append(Finding(Severity.OK, "access", f"logged in as {address.user!r}"))
    return found


def _history(survey: EtcdSurvey, said: Sequence[pb.StatusResponse]) -> list[Finding]:
    clusters = {status.header.cluster_id for status in said}
    if len(clusters) > 1:
        text = f"the servers are of {len(clusters)} etcd clusters: shards would get two homes"
        step = "name servers of one etcd cluster only"
        return [Finding(Severity.ERROR, "store", text, step)]
    text = "".join(f"history {cluster:x}" for cluster in clusters)
    if not said:
        return []
    text += f", revision {max(status.header.revision for status in said):,}"
    if survey.oldest:
        text += f"; changes are kept from revision {survey.oldest:,} on"
    return [Finding(Severity.OK, "store", text)]


def _numbers(version: str) -> tuple[int, ...]:
    numbers = version.partition("-")[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
