"""Finds all problems of the models in repositories, without a load. The command `headrace check` prints them."""
