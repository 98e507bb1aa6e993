"""In which task or thread does a handler run? Pooled workers, threads for blocking methods, and
what observes a run."""
