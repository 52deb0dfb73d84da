"""Run files: tables, rules and parsing, with every fault in one report."""
