"""Shards at home in this process: their entities, mailboxes and turns."""
