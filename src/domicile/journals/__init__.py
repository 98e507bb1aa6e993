"""Where events are kept: backends of the journal port."""
