"""How good a model is: one file for each kind of measure."""
