"""One run of a process: it joins, serves, leaves or is fenced, and a supervisor begins it anew."""
