"""Cases for the search for the origin of a bad step, in a small transformer and bare."""
