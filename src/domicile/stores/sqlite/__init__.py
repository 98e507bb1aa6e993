"""The embedded store: how do the processes of one machine share a file without a server?

- `store`     `SqliteStore`, called on the event loop, and its watches
- `threads`   the job threads, and the notifier of writes to a file
- `jobs`      what the writing and the reading thread do
- `file`      one thread's connection, its errors, and the history of the file (S5)
- `schema`    the tables, and each write as one SQL statement (S9)
- `recent`    the newest commits, so that watches need not read them again
- `findings`  what `domicile doctor` reports about the file
- `threaded`  the store for the thread renewer, while the event loop is blocked

Only SQLite itself may open or close the file and its -wal and -shm files.
"""
