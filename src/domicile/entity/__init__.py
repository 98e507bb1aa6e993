"""Entities: how they are defined, addressed and run. Imports ports and core, never a backend."""
