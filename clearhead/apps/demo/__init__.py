"""The four demos of `clearhead demo`."""
