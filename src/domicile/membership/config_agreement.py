"""The `config` that all members of a cluster agree on.

Only `domicile.membership.member` calls it. It must never write `config` unconditionally: two
members that join at once with different roles both end up in it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from domicile.core.state.agreement import (
    agreed_tokens,
    common_protocol,
    foreign_token,
    mismatch,
    no_common_protocol,
)
from domicile.core.state.cluster_view import ClusterView
from domicile.core.state.keys import CONFIG_KEY
from domicile.core.state.records import ConfigRecord, TypeRecord, decode_record, encode_record
from domicile.core.state.txn import Absent, At, Committed, Condition, Item, Put
from domicile.errors import ConfigError
from domicile.membership.store_calls import MemberStoreCalls

NO_TYPES: Mapping[str, TypeRecord] = {}


def check_protocols(members: ClusterView, own: tuple[int, int]) -> None:
    """`ConfigError` if a registered node speaks no wire protocol that this process does (DX-19).

    Links refuse each other as well; here it is known before anybody counts on this process.
    """
    for node in members.nodes.values():
        if not common_protocol(own, node.protocols):
            raise ConfigError(
                f"this process cannot talk to node {node.node!r}: "
                f"{no_common_protocol(own, node.protocols)}"
            )


async def agree_on_config(
    calls: MemberStoreCalls,
    members: ClusterView,
    shards: Mapping[str, int],
    types: Mapping[str, TypeRecord] = NO_TYPES,
    tokens: tuple[str, ...] = (),
    *,
    hosts: bool = True,
) -> None:
    """See to it that `config` holds these roles and types; `ConfigError` if it says otherwise.

    `tokens` are fingerprints of what this process has; only one that `hosts` may change them.
    Starts from what was listed. `StoreUnavailable` only once the incarnation is over.
    """
    config, revision = members.config, members.config_revision
    failures = 0
    while True:
        known = () if config is None else config.tokens
        why = foreign_token(known, tokens, inhabited=bool(members.nodes))
        if why:
            raise ConfigError(why)
        if hosts:
            known = agreed_tokens(known, tokens)
        wanted = _agreed(config, shards, types, known)
        if wanted is None or wanted == config:
            return
        condition: Condition = At(CONFIG_KEY, revision) if revision else Absent(CONFIG_KEY)
        outcome = await calls.commit(condition, Put(CONFIG_KEY, encode_record(wanted)))
        if isinstance(outcome, Committed):
            return
        failures += 1
        await calls.pause(failures)
        config, revision = _read_config(await calls.read(lambda: calls.store.get(CONFIG_KEY)))


def _read_config(item: Item | None) -> tuple[ConfigRecord | None, int]:
    if item is None:
        return None, 0
    try:
        return decode_record(item.value, ConfigRecord), item.revision
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"the cluster's config record cannot be read ({error}); check that the store URL and "
            "namespace are those of a Domicile cluster of this version"
        ) from error


def _agreed(
    config: ConfigRecord | None,
    shards: Mapping[str, int],
    types: Mapping[str, TypeRecord],
    tokens: tuple[str, ...],
) -> ConfigRecord | None:
    """What `config` must be so that this member fits in; an error if it cannot."""
    if config is None:
        config = ConfigRecord({})
        if not shards and not types and not tokens:
            return None
    own_hash = ConfigRecord({}).hash
    if config.hash != own_hash:
        raise ConfigError(
            f"the cluster picks shards by {config.hash!r}, this process by {own_hash!r}; run the "
            "version the cluster runs, or use another cluster"
        )
    for role, count in shards.items():
        known = config.shards.get(role, count)
        if known != count:
            raise ConfigError(
                f"role {role!r} has {known} shards in this cluster, this process is set to "
                f"{count}; set shards={known} here, or use another cluster"
            )
    for name, own in types.items():
        why = mismatch(name, config.types.get(name, own), own)
        if why:
            raise ConfigError(why)
    return ConfigRecord(
        dict(sorted({**config.shards, **shards}.items())),
        config.hash,
        dict(sorted({**config.types, **types}.items())),
        tokens,
    )
