"""Events of durable entities in one SQLite file, for the processes of one machine.

`schema` has the tables and the one statement that writes a batch; `file` opens the file and says
what its errors mean; `journal` implements the port. The file is another than the store's: a slow
commit of events must not delay a renewal of a lease.
"""
