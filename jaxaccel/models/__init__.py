"""Models assembled from `jaxaccel.nn`, and their files on disk."""
