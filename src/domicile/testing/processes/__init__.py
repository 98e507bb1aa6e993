"""Clusters of real processes on this machine, and what a test can do to them."""
