"""`clearhead check run.toml`: checks that a training job resumes exactly, and that its batches can be divided."""
