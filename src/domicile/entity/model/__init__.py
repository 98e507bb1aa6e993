"""What users write: entities, handlers, references, and how their values travel."""
