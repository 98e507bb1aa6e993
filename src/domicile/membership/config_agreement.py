"""The `config` that all members of a cluster agree on.

Only `domicile.membership.member` calls it. It must never write `config` unconditionally: if two
members with different roles join at the same time, `config` must have both roles.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from domicile.core.state.agreement import (
    NO_JOURNALS,
    agreed_config,
    agreed_tokens,
    common_protocol,
    foreign_token,
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
    """`ConfigError` if a registered node and this process share no wire protocol (DX-19).

    Links would refuse each other too; this check comes before this process registers.
    """
    for node in members.nodes.values():
        if not common_protocol(own, node.protocols):
            raise ConfigError(
                f"this process cannot talk to node {node.node!r}: "
                f"{no_common_protocol(own, node.protocols)}"
            )


def check_moved(members: ClusterView) -> None:
    """`ConfigError` if the cluster is or was copied to another store, or from one.

    Two stores with the same shards and epochs would make two homes (I1).
    """
    moved = members.moved
    if moved is not None and moved.direction == "to":
        raise ConfigError(
            f"this cluster was moved to the store {moved.store}: name that one. To use this store "
            "again, copy the cluster back (`domicile store copy --replace`), or end the move with "
            "`domicile store reopen`"
        )
    if moved is not None:
        raise ConfigError(
            f"this cluster is being copied here from the store {moved.store} and is not whole yet: "
            "wait until `domicile store copy` has ended; if it failed, run it again"
        )


async def agree_on_config(
    calls: MemberStoreCalls,
    members: ClusterView,
    shards: Mapping[str, int],
    types: Mapping[str, TypeRecord] = NO_TYPES,
    tokens: tuple[str, ...] = (),
    journals: Mapping[str, str] = NO_JOURNALS,
    *,
    hosts: bool = True,
) -> None:
    """Make `config` hold these roles and types; `ConfigError` if it contradicts them.

    `tokens` are fingerprints of this process's tokens; only a process that `hosts` may change those
    in `config`. `journals` has the history of each role's journal (J11). Starts from the last
    listing. `StoreUnavailable` only after the incarnation is over.
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
        wanted = agreed_config(config, shards, types, known, journals)
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
