"""Custom modules: their files, registration, cost, and a trial call before anything runs."""
