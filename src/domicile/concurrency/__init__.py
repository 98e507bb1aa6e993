"""How do parts of a process share tasks, threads and work? Helpers; each object has one owner.

Any module outside the core may use them. They know nothing about clusters, stores or entities.

- `task_set`        tasks that one object owns and ends together
- `single_flight`   work that is done once for all callers that need it at the same time
- `waiting_line`    tasks that wait, and go on in the order in which they came
- `cadence`         calls at equal intervals, however long each takes
- `daemon_threads`  threads for users' functions that block or hang
"""
