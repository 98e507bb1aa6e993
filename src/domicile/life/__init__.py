"""One incarnation of a node or client, and how one follows the other."""

from domicile.life.backends import Backends, Plan
from domicile.life.life import Life
from domicile.life.lives import Lives

__all__ = ["Backends", "Life", "Lives", "Plan"]
