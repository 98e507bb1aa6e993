"""What a user might take instead, one module each, run with an interpreter of its own."""
