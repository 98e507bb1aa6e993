"""The link layer under chance: exactly once in order per link, or the loss is told."""

from __future__ import annotations

import asyncio

import pytest
from links_lab import Host, Lab, simulate

from domicile.core.ids import LinkKey
from domicile.settings import Settings


def judge(hosts: list[Host]) -> None:
    """Exactly once and in order per link, a prefix where a loss was told."""
    for host in hosts:
        for other in hosts:
            if other is host:
                continue
            links = [k for k in host.requests if k.sender == other.inc]
            for key in links:
                sent = other.sent[key.link]
                assert host.requests[key] == sent[: len(host.requests[key])]
            alive = other.layer._out.get(host.inc)
            for link, heard in other.heard.items():
                key = LinkKey(host.inc, link)
                replied = host.replied.get(LinkKey(other.inc, link))
                if replied is not None:
                    assert heard == replied[: len(heard)], key
            started = [link for link in other.sent if other.meant[link] == host.name]
            told = sum(peer == host.inc for peer, _ in other.lost)
            assert told == len(started) - (alive is not None), "one loss told for each lost link"
            if alive is not None:
                link = alive.link.link
                assert host.requests[LinkKey(other.inc, link)] == other.sent[link]
                assert other.heard[link] == other.sent[link]


async def chaos(lab: Lab) -> None:
    chance = lab.world.stream("chaos")
    hosts = [await lab.host(name, Settings(link_frames=chance.choice([2, 256]))) for name in "abc"]
    n = 0
    for _ in range(150):
        one, other = chance.sample(hosts, 2)
        step = chance.random()
        if step < 0.6:
            for _ in range(chance.choice([1, 1, 5])):
                n += 1
                one.send(other, n)
        elif step < 0.75:
            lab.network.cut(one.name, other.name)
        elif step < 0.8:
            names = ["a", "b", "c"]
            names.remove(one.name)
            lab.network.partition([[one.name], names])
        elif step < 0.84:
            lab.network.block(one.name, other.name)
        elif step < 0.92:
            lab.network.heal()
        elif step < 0.94:
            lab.network.slow(one.name, chance.choice([0.0, 0.05]))
        elif step < 0.97 and not one.loop.frozen:
            one.loop.freeze()
            lab.world.call_at(lab.world.now + chance.uniform(0, 8), one.loop.thaw)
        await asyncio.sleep(chance.choice([0.0, 0.001, 0.03, 0.3, 1.5]))
    lab.network.heal()
    await asyncio.sleep(30)
    for one in hosts:
        for other in hosts:
            if other is not one:
                n += 1
                one.send(other, n)
    await asyncio.sleep(5)
    assert not any(host.layer.pending() for host in hosts)
    judge(hosts)


@pytest.mark.parametrize("seeds", [range(0, 15), range(15, 30)], ids=str)
def test_exactly_once_in_order_or_told_whatever_the_network_does(seeds: range) -> None:
    lost = resumed = 0
    for seed in seeds:
        lab = simulate(chaos, seed)
        lost += lab.history.counts["link.lost"]
        resumed += any(event.fields["session"] > 1 for event in lab.history.of("taken"))
    assert lost, "chance never lost a link"
    assert resumed, "chance never resumed a link"


def test_the_same_seed_gives_the_same_run() -> None:
    assert simulate(chaos, 7).history.digest() == simulate(chaos, 7).history.digest()
