"""The texts of the files that rule a server: its settings, and who may connect. Pure.

The operator's own files are read and never written; only what `ALTER SYSTEM` says of the names in
`CHANGED` is taken back. `server.conf` includes them and adds what the group needs. What the gate
and the driver change lies in two small files of their own, so that neither waits for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from domicile.failover.records import WriteQuorum

NOBODYS_NAME = "domicile-nobody"
"""No follower has this `application_name`: who waits for it waits for ever."""

LONGEST_NAME = 63
"""PostgreSQL cuts off longer names of applications."""

DEFAULTS = """\
wal_level = replica
wal_log_hints = on
hot_standby = on
max_wal_senders = 10
max_replication_slots = 10
wal_keep_size = '1GB'
max_slot_wal_keep_size = '8GB'
wal_retrieve_retry_interval = '200ms'
"""
"""What holds unless the operator's own settings say otherwise."""

RULED = {"restart_after_crash": "off", "recovery_target_timeline": "latest", "hot_standby": "on"}
"""What must hold, by the command line: that wins over every file, also over `ALTER SYSTEM`. A
server that crashed and came back by itself would be open in its old epoch."""

CHANGED = ("synchronous_standby_names", "primary_conninfo", "primary_slot_name")
"""What the gate and the driver change while the server runs, so by files. Nothing else may say it:
`postgresql.auto.conf` is read after all other files, and the command line wins over them."""

AUTO_FILE = "postgresql.auto.conf"
"""What `ALTER SYSTEM` writes, and `pg_basebackup -R`."""

WEAK_COMMITS = ("off", "local", "remote_write")
"""Values of `synchronous_commit` by which a client gets its answer before a replica has it all."""


class GateState(msgspec.Struct, frozen=True, kw_only=True):
    """What the gate last said of a server."""

    epoch: int = 0
    """In which it is open; 0: it is shut."""
    run: str = ""
    """Which run of the server that holds for."""
    quorum: WriteQuorum | None = None
    since: int = 0
    """Every commit behind this place waits for the quorum."""
    nobody: bool = False
    """Commits wait for a name that nobody has."""
    stamp: str = ""
    """Tells that the server has loaded this."""


class FollowState(msgspec.Struct, frozen=True, kw_only=True):
    """Which primary a server follows, as its driver last said."""

    address: str = ""
    stamp: str = ""


def quoted(text: str) -> str:
    """A value in a file of settings."""
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"


def unquoted_value(text: str) -> str:
    """The text of a value as `quoted` writes it."""
    return text[1:-1].replace("''", "'").replace("\\\\", "\\")


def standby_names(state: GateState) -> str:
    """The value of `synchronous_standby_names`."""
    if state.nobody:
        return f'ANY 1 ("{NOBODYS_NAME}")'
    if state.quorum is None:
        return ""
    members = state.quorum.members
    if len(members) < state.quorum.count:
        # Too few to make a quorum: writes wait, none is lost.
        members = (*members, *[NOBODYS_NAME] * (state.quorum.count - len(members)))
    names = ", ".join('"' + one.replace('"', '""') + '"' for one in members)
    return f"ANY {state.quorum.count} ({names})"


def gate_conf(state: GateState) -> str:
    """The file that the gate writes."""
    lines = [
        f"synchronous_standby_names = {quoted(standby_names(state))}",
        f"domicile.gate = {quoted(msgspec.json.encode(state).decode())}",
        f"domicile.gate_stamp = {quoted(state.stamp)}",
    ]
    if not state.epoch:
        # No fence: a courtesy to what runs inside the server, as a scheduler of jobs.
        lines += ["default_transaction_read_only = on", "autovacuum = off"]
    return "\n".join((*lines, ""))


def follow_conf(state: FollowState, conninfo: str, slot: str) -> str:
    """The file that the driver writes."""
    lines = [
        f"primary_conninfo = {quoted(conninfo if state.address else '')}",
        f"primary_slot_name = {quoted(slot if state.address else '')}",
        f"domicile.follows = {quoted(state.address)}",
        f"domicile.follow_stamp = {quoted(state.stamp)}",
    ]
    return "\n".join((*lines, ""))


def server_conf(own: str, gate: str, follow: str) -> str:
    """The file that the server is started with; the arguments are the paths of the others."""
    return "".join(
        (
            "# Written by Domicile at each start. Your own settings belong into the file below.\n",
            DEFAULTS,
            f"include_if_exists {quoted(own)}\n",
            f"include {quoted(gate)}\n",
            f"include {quoted(follow)}\n",
        )
    )


def command_settings(words: Sequence[str]) -> dict[str, str]:
    """The settings in a command that starts a server: `-c name=value`, or `--name=value`."""
    found: dict[str, str] = {}
    for before, word in pairwise(("", *words)):
        text = ""
        if before == "-c":
            text = word
        elif word.startswith("--") or (word.startswith("-c") and len(word) > len("-c")):
            text = word[2:]
        name, equals, value = text.partition("=")
        if equals:
            found[name.strip().replace("-", "_").lower()] = value
    return found


def names_in(text: str) -> list[str]:
    """The names that a file of settings sets."""
    words = (line.replace("=", " ").split(None, 1) for line in text.splitlines())
    return list(dict.fromkeys(one[0].lower() for one in words if one and one[0][0] != "#"))


def own_rules(text: str, roles: tuple[str, ...]) -> str:
    """The rules of a `pg_hba.conf` as far as they speak of the group's own roles.

    All others have no rule left, and so may not connect. Rules by group, by pattern or by file are
    left out: they can't be told apart from here.
    """
    found = ["# Written by Domicile. Shut: only the group's own roles may connect."]
    for line in joined_lines(text):
        words = rule_words(line)
        if len(words) < 4 or words[0].startswith("include"):
            continue
        users = [user for user in words[2].split(",") if user]
        named = [role for role in roles if "all" in users or role in unquoted(users)]
        if named:
            users_now = ",".join('"' + role.replace('"', '""') + '"' for role in named)
            found.append(" ".join((*words[:2], users_now, *words[3:])))
    return "\n".join((*found, ""))


def unquoted(words: list[str]) -> list[str]:
    """Names without the quotes that they may stand in."""
    return [word[1:-1] if word.startswith('"') and word.endswith('"') else word for word in words]


def joined_lines(text: str) -> list[str]:
    """The lines of a file of rules; one that ends in a backslash goes on in the next."""
    return text.replace("\\\n", " ").splitlines()


def rule_words(line: str) -> list[str]:
    """The words of a rule. Quotes hold blanks and commas together, `#` begins a comment."""
    words: list[str] = []
    word, inside = "", False
    for sign in line:
        if sign == '"':
            inside = not inside
            word += sign
        elif sign == "#" and not inside:
            break
        elif sign.isspace() and not inside:
            if word and not word.endswith(","):
                words.append(word)
                word = ""
        else:
            # A list may have blanks after its commas.
            word += sign
    return [*words, word] if word else words


def conninfo(**words: str) -> str:
    """A connection string for PostgreSQL's own programs."""
    return " ".join(
        f"{name}='" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        for name, value in words.items()
        if value
    )


def slot_name(server: str) -> str:
    """The name of a follower's slot: lower case letters, digits and underscores only."""
    plain = "".join(
        sign if sign.isascii() and (sign.isalnum() or sign == "_") else f"_{ord(sign):x}_"
        for sign in server.lower()
    )
    return f"domicile_{plain}"[:LONGEST_NAME]


def passfile(host: str, user: str, password: str) -> str:
    """A line of a password file, for any port and database of any host if `host` is `*`."""
    fields = (host, "*", "*", user, password)
    return ":".join(one.replace("\\", "\\\\").replace(":", "\\:") for one in fields) + "\n"
