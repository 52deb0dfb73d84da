"""Runs beside one another: what each is and cost and reached, whether the comparison is fair, and their curves."""
