"""Number formats of a few bits."""
