"""Translation: a text in, a text out, token by token."""
