"""The run file: its sections, its rules, and every fault in one report."""
