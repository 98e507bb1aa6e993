"""Which handlers do not end, and how are they ended? `domicile inspect` and `domicile kick`."""
