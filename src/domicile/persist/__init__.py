"""Durable entities: journals and what is built on them."""
