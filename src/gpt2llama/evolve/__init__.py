"""What does each change buy? A switch at a time, matched, repeated, with an interval."""
