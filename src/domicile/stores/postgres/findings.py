"""What `domicile doctor` reports about a PostgreSQL server and the store in it.

Only `domicile.stores.postgres.store` uses it. `FACTS` is one query that any user may run, and that
changes nothing; the rest judges its row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from domicile.ports.findings import Finding, Severity
from domicile.stores.postgres.schema import SCHEMA, USED

OLDEST = 130000
"""PostgreSQL 13."""

FULL = 0.8
"""The part of `max_connections` in use from which a warning is given."""

CLOCKS_S = 1.0
"""Seconds between the clocks of the server and of this machine that are worth a note."""

STALE_S = 2.0
LONG_S = 300.0
"""Seconds that a transaction may last before it is worth a warning: it keeps old rows alive."""

_USED = ", ".join(f"'{name}'" for name in USED)

FACTS = f"""SELECT
    current_setting('server_version') AS version,
    current_setting('server_version_num')::int AS number,
    pg_is_in_recovery() AS standby,
    current_setting('transaction_read_only') = 'on' AS read_only,
    current_user::text AS who,
    (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS super,
    has_database_privilege(current_database(), 'CREATE') AS may_create,
    (SELECT pg_get_userbyid(nspowner)::text FROM pg_namespace WHERE nspname = '{SCHEMA}') AS owner,
    (SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = '{SCHEMA}')
        AS may_use,
    (SELECT array_agg(p.proname::text ORDER BY p.proname)
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = '{SCHEMA}' AND p.proname IN ({_USED})
            AND NOT has_function_privilege(p.oid, 'EXECUTE')) AS forbidden,
    current_setting('fsync') AS fsync,
    current_setting('full_page_writes') AS full_pages,
    current_setting('synchronous_commit') AS commits,
    current_setting('synchronous_standby_names') AS standby_names,
    (SELECT count(*) FROM pg_stat_replication) AS standbys,
    (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')) AS waited_for,
    (SELECT count(*) FROM pg_stat_replication WHERE sync_state IS NULL) AS unseen,
    current_setting('max_connections')::int AS most,
    (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'
        OR backend_type IS NULL AND datid IS NOT NULL) AS sessions,
    (SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::float8
        FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid())
        AS longest,
    pg_database_size(current_database()) AS database,
    (SELECT sum(pg_total_relation_size(c.oid))::bigint
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = '{SCHEMA}' AND c.relkind = 'r') AS size,
    extract(epoch FROM clock_timestamp())::float8 AS wall
"""

MAY_LOOK = f"""SELECT coalesce(bool_and(has_table_privilege(c.oid, 'SELECT')), false)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = '{SCHEMA}' AND c.relkind = 'r'"""
"""Whether this user may read the tables themselves, as their owner may."""

CONTENTS = f"""SELECT m.format, m.history, m.revision, m.trimmed,
    extract(epoch FROM clock_timestamp())::float8 - m.wall AS stale,
    (SELECT count(*) FROM {SCHEMA}.item) AS keys, (SELECT count(*) FROM {SCHEMA}.lease) AS leases,
    extract(epoch FROM clock_timestamp())::float8 - (SELECT min(at) FROM {SCHEMA}.txn) AS oldest
    FROM {SCHEMA}.meta m
"""

FactsRow = Mapping[str, Any]


def postgres_findings(
    facts: FactsRow, contents: FactsRow | None, now: float | None = None
) -> list[Finding]:
    """Judge a server, by rows of `FACTS` and of `CONTENTS`, if this user may ask for that."""
    return [
        *_server(facts), *_rights(facts), *_durability(facts), *_standbys(facts),
        *_sessions(facts), *_clock(facts, time.time() if now is None else now),
        *_contents(facts, contents),
    ]  # fmt: skip


def _server(facts: FactsRow) -> list[Finding]:
    role = "standby" if facts["standby"] else "primary"
    found = [Finding(Severity.OK, "server", f"PostgreSQL {facts['version']}, {role}")]
    if facts["number"] < OLDEST:
        said = f"PostgreSQL {facts['version']} is too old"
        found.append(Finding(Severity.ERROR, "server", said, "use PostgreSQL 13 or newer"))
    if facts["standby"]:
        said, step = "a standby takes no writes", "name the primary, or all servers of the group"
        found.append(Finding(Severity.ERROR, "server", said, step))
    elif facts["read_only"]:
        found.append(
            Finding(
                Severity.ERROR, "server", "transactions may not write here",
                "look at `default_transaction_read_only` of the server, the database and the user",
            )
        )  # fmt: skip
    return found


def _rights(facts: FactsRow) -> list[Finding]:
    who = f"user {facts['who']!r}"
    if facts["owner"] is None:
        if facts["may_create"]:
            said = f"{who} may make the store's schema {SCHEMA!r}, which is not there"
            return [Finding(Severity.OK, "privileges", said)]
        return [
            Finding(
                Severity.ERROR, "privileges",
                f"{who} may not make the store's schema {SCHEMA!r}, which is not there",
                "start a node once as a user with CREATE on the database, as in the page about "
                "PostgreSQL",
            )
        ]  # fmt: skip
    found: list[Finding] = []
    missing: list[str] = []
    grants: list[str] = []
    role = _identifier(facts["who"])
    if not facts["may_use"]:
        missing.append(f"USAGE on schema {SCHEMA}")
        grants.append(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {role}")
    if facts["forbidden"]:
        missing.append(f"EXECUTE on {', '.join(facts['forbidden'])}")
        grants.append(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {SCHEMA} TO {role}")
    if missing:
        step = f"as {facts['owner']!r}: {'; '.join(grants)}"
        found.append(
            Finding(Severity.ERROR, "privileges", f"{who} lacks {'; '.join(missing)}", step)
        )
    else:
        owns = "owns the store's schema" if facts["who"] == facts["owner"] else (
            f"may call the store's functions, which {facts['owner']!r} owns"
        )  # fmt: skip
        found.append(Finding(Severity.OK, "privileges", f"{who} {owns}"))
    if facts["super"]:
        step = "give nodes a user with few rights, as in the page about PostgreSQL"
        found.append(Finding(Severity.NOTE, "privileges", f"{who} is a superuser", step))
    return found


def _durability(facts: FactsRow) -> list[Finding]:
    found: list[Finding] = []
    if facts["fsync"] != "on":
        found.append(
            Finding(
                Severity.ERROR, "durability",
                "fsync = off: a crash of the machine loses acknowledged commits, or the database",
                "set `fsync = on`",
            )
        )  # fmt: skip
    if facts["full_pages"] != "on":
        found.append(
            Finding(
                Severity.WARNING, "durability",
                "full_page_writes = off: a crash can leave torn pages, unless the file system "
                "writes pages whole", "set `full_page_writes = on`",
            )
        )  # fmt: skip
    if facts["commits"] != "on":
        found.append(
            Finding(
                Severity.ERROR, "durability",
                f"synchronous_commit = {facts['commits']} in a session that asked for on: a "
                "renewal could be lost that its node believes in",
                "see what changes the session's settings; a pooler in transaction mode does",
            )
        )  # fmt: skip
    if not found:
        said = "fsync on; the store's sessions commit with synchronous_commit = on"
        found.append(Finding(Severity.OK, "durability", said))
    return found


def _standbys(facts: FactsRow) -> list[Finding]:
    names, standbys = facts["standby_names"], facts["standbys"]
    waited_for, unseen = facts["waited_for"], facts["unseen"]
    if names and not waited_for and not unseen:
        return [
            Finding(
                Severity.ERROR, "standbys",
                f"synchronous_standby_names = {names!r}, and no such standby is connected: every "
                "commit waits for one", "start that standby, or change the setting",
            )
        ]  # fmt: skip
    if names:
        said = f"commits wait for a standby (synchronous_standby_names = {names!r})"
        return [Finding(Severity.OK, "standbys", f"{standbys} connected; {said}")]
    if not standbys:
        return [Finding(Severity.OK, "standbys", "none: one server, and no failover by itself")]
    return [
        Finding(
            Severity.WARNING, "standbys",
            f"{standbys} connected, and no commit waits for one: after a failover acknowledged "
            "commits may be missing, and processes notice that only afterwards",
            "set `synchronous_standby_names`, or do not fail over by itself while nodes run",
        )
    ]  # fmt: skip


def _sessions(facts: FactsRow) -> list[Finding]:
    said = f"{facts['sessions']:,} of {facts['most']:,} sessions in use"
    found = [Finding(Severity.OK, "connections", said)]
    if facts["sessions"] > facts["most"] * FULL:
        step = "raise `max_connections`: new nodes and their renewals find none otherwise"
        found = [Finding(Severity.WARNING, "connections", said, step)]
    longest = facts["longest"]
    if longest is not None and longest > LONG_S:
        found.append(
            Finding(
                Severity.WARNING, "connections",
                f"a transaction in this database is open for {longest:,.0f} s: old versions of the "
                "store's few hot rows stay, and calls get slower",
                "look at xact_start in pg_stat_activity",
            )
        )  # fmt: skip
    return found


def _clock(facts: FactsRow, now: float) -> list[Finding]:
    apart_s = round(facts["wall"] - now, 1) + 0.0  # not -0.0
    said = f"the server's clock is {apart_s:+,.1f} s from this machine's"
    if abs(apart_s) <= CLOCKS_S:
        return [Finding(Severity.OK, "clock", said)]
    return [Finding(Severity.NOTE, "clock", f"{said}; leases do not depend on it")]


def _contents(facts: FactsRow, contents: FactsRow | None) -> list[Finding]:
    size = f"the store's tables take {_mib(facts['size'] or 0)} of the database's "
    size += _mib(facts["database"])
    if facts["owner"] is None:
        said = f"there is no store in this database, which has {_mib(facts['database'])}"
        return [Finding(Severity.NOTE, "tables", said, "start a node, or name another database")]
    found = [Finding(Severity.OK, "tables", size)]
    if contents is None:
        said = "this user may not read the tables, so their history is not shown"
        return [*found, Finding(Severity.NOTE, "tables", said, "ask as their owner")]
    oldest = contents["oldest"]
    since = "" if oldest is None else f", the oldest {oldest:,.0f} s old"
    found.append(
        Finding(
            Severity.OK, "store",
            f"format {contents['format']}, history {contents['history'][:8]}, revision "
            f"{contents['revision']:,}; {contents['keys']:,} keys, {contents['leases']:,} leases; "
            f"changes are kept from revision {contents['trimmed'] + 1:,} on{since}",
        )
    )  # fmt: skip
    stale_s = contents["stale"]
    if contents["leases"] and not 0 <= stale_s <= STALE_S:
        found.append(
            Finding(
                Severity.WARNING, "time",
                f"store time last advanced {stale_s:,.0f} s ago, so {contents['leases']} leases do "
                "not end", "it advances as soon as a process of any cluster runs",
            )
        )  # fmt: skip
    return found


def _identifier(name: str) -> str:
    """A name as SQL takes any."""
    return '"' + name.replace('"', '""') + '"'


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
