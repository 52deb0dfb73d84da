"""`clearhead explain`: the numbers of a forward pass, with formulas and code; see `explanation`, `score`, `page`."""
