"""`clearhead check run.toml`: whether a training job resumes exactly, and whether it can be divided."""
