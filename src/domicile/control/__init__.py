"""Control planes: shells around the core's decisions about who owns what, and a process's own
standing in the cluster. They carry out effects and report back; they decide nothing themselves.
"""
