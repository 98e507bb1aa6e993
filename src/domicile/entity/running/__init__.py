"""The tasks and threads in which handlers run."""
