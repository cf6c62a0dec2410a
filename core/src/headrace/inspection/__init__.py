"""Checks the models of repositories as a load does, without serving them. ``headrace check`` stands on it."""
