"""Which handlers have run for too long, and how an operator ends them (DX-09)."""
