"""From files of text to batches of ids: sources, stores, objectives, batches."""
