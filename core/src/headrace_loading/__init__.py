"""Loads and unloads models for a control mode of a plugin."""

from headrace_loading.load_control import LoadableModel, LoadControl

__all__ = ["LoadControl", "LoadableModel"]
