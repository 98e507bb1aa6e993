"""What happened in a run, as people read it: a timeline in words and a picture of it.

`trace` reads a history, simulated or real; `words.text` and `picture.draw` show what it found.
"""
