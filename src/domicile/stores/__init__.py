"""Coordination stores: implementations of `domicile.ports.store`. `memory` is the reference."""
