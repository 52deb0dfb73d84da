"""The command line: one small file per command, results on stdout, messages on stderr."""
