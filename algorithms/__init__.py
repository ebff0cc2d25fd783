"""Routing algorithms: the interface and one small file per algorithm."""
