"""One file of records for each family of Hugging Face checkpoints."""
