"""Applications that answer over HTTP: the explorer, computed on demand, and in `api` the server of models."""
