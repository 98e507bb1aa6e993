"""Durable entities: how what they persist comes into a journal, and back.

Read `eventsourced` for what users write, `batches` for what is written together and what becomes of
it, `writer` for what carries that out against a journal. Journals themselves are in
`domicile.journals`.
"""
