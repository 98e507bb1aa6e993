"""What can operators see and change of a journal? `domicile journal`: commands above the work."""
