"""Families of Hugging Face checkpoints: one module of records for each family, or for several similar families."""
