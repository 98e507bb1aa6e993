"""Events of durable entities in a PostgreSQL database, for the nodes of many machines.

`schema` has the tables and the function that writes a batch; `connections` opens connections and
says what their errors mean; `journal` implements the port. Needs the extra `domicile[postgres]`.
"""
