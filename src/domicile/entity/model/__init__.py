"""What does a user write and call? Entity classes, handlers, refs, regions, and their codec.
Nothing here sends or runs anything."""
