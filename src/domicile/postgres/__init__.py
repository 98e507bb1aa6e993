"""What the store and the journal in PostgreSQL share: sessions, and what errors mean.

Needs the extra `domicile[postgres]`. Nothing here knows a table.
"""
