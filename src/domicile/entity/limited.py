"""The host of a shard at a node that limits its residents: it also says which ones are in use.

Made by the runtime instead of a plain host when there is a limit, so that without one no message
pays for it.
"""

from __future__ import annotations

from domicile.entity.cell import Cell
from domicile.entity.shard import ShardHost


class LimitedHost(ShardHost):
    """As `ShardHost`; every use counts for the policy that chooses whom to stop."""

    _limited = True

    def _used(self, cell: Cell, now: float) -> None:
        super()._used(cell, now)
        if self.cells.get(cell.key) is cell:
            self.runtime.residents.touch(cell)
