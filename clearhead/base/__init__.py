"""Foundations for every other folder: errors, files, printing, progress, machine, argument checks, hook points."""
