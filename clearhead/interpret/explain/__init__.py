"""The forward pass of a model on a text, number by number: see `explanation`, `score` and `page`."""
