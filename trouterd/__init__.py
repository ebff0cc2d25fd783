"""The daemon: configuration, supervisor, API, workers and their command line."""

__version__ = "0.1.0"
