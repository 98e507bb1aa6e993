"""Links between incarnations (a pure machine and its shell) and the connections under them."""
