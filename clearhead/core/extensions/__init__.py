"""Parts of a user's own: their files, what is built from them, their trial before anything runs, and their cost."""
