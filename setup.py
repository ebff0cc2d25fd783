"""The C ring core; everything else is in pyproject.toml. Without a compiler the pure-Python ring is used instead."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("ipc._ring", ["ipc/_ring.c"], depends=["ipc/_ring_core.h"], optional=True)])
