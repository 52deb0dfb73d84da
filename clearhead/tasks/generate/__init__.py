"""Language modelling: continue a text token by token."""
