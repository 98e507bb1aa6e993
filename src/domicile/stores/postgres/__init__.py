"""The coordination store in a PostgreSQL database, for clusters over many machines (S10).

`schema` has the tables and the functions that read and write them; `history` is what a process
knows of the store's past (S5); `line` is one connection with its queue; `client` makes calls of
jobs; `standby` advances store time while nobody leads (S4); `store` implements the port; `findings`
is what `domicile doctor` reports about a server. Needs the extra `domicile[postgres]`.
"""
