"""Applications that answer over HTTP."""
