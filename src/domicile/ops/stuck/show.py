"""How `domicile inspect` looks on a terminal. It draws what `ops.stuck.inspecting` found and reads
nothing."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from domicile.ops.show import age_text, count, place_view, stuck_view
from domicile.ops.stuck.inspecting import EntityInspected, NodeInspected, ranges


def inspected_view(seen: NodeInspected | EntityInspected) -> RenderableType:
    """One node or one entity."""
    head = place_view(seen.place) if isinstance(seen, EntityInspected) else _node(seen)
    more = 0 if isinstance(seen, EntityInspected) else seen.more_stuck
    if not seen.stuck:
        return Group(head, Text("nothing is stuck", style="green"))
    return Group(head, stuck_view(seen.stuck, more, whole=True))


def _node(seen: NodeInspected) -> RenderableType:
    node = seen.node
    table = Table.grid(padding=(0, 2))
    table.add_row("node", f"{node.node} ({node.incarnation})")
    table.add_row("status", node.status + (", coordinator" if node.coordinator else ""))
    table.add_row("address", node.address)
    if node.version:
        table.add_row("version", node.version)
    table.add_row("age", age_text(node.age_s))
    table.add_row("lease", f"{seen.ttl_s:g} s")
    table.add_row("protocols", f"{seen.protocols[0]} to {seen.protocols[1]}")
    table.add_row("types", ", ".join(node.types) or "none")
    for role in node.roles:
        served = seen.serving.get(role, [])
        table.add_row(f"serves {role}", f"{count(len(served), 'shard')}: {ranges(served)}")
        if role in seen.moving:
            moving = seen.moving[role]
            table.add_row(f"moving {role}", f"{count(len(moving), 'shard')}: {ranges(moving)}")
    if seen.residents is not None:
        table.add_row("residents", count(seen.residents, "entity", "entities"))
    return table
