"""HTTP applications: the live attention explorer, and in `api` the server of models."""
