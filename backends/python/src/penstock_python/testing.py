"""A pytest plugin: the fixture ``python_model``."""

from __future__ import annotations
