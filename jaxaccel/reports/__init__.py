"""Pages about finished runs, readable without a server or a network."""
