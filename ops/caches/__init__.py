"""Layer caches behind one protocol."""
