"""The version of the installed package."""

from importlib import metadata

try:
    __version__ = metadata.version("clearhead")
except metadata.PackageNotFoundError:  # not installed: a source folder on the path
    __version__ = "0+unknown"
