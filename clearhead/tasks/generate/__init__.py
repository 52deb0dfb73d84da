"""Language modelling: a text is continued, token by token."""
