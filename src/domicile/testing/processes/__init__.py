"""How does a program behave in real processes? Clusters on this machine, and faults for them."""
