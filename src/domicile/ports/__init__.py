"""What does Domicile need from the world? Protocols only; each has an in-memory implementation."""
