"""Progress of a run: reports, the live panel and plots."""
