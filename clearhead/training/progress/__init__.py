"""Progress of a run: reports, console output, plots and trackers."""
