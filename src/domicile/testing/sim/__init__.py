"""How does a cluster behave in every order of events? Whole clusters in one process, in virtual
time."""
