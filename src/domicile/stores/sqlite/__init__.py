"""The embedded store: many processes of one machine, one file, no server."""
