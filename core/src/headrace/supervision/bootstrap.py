"""The first code of a child process, run as a program by whatever interpreter its model wants.

Arguments: the name of the instance (for ``ps``), and a JSON object: ``entry`` is the function to call,
``packages`` are imported from the server's installation, and nothing else of it is, because the rest
belongs to the model's environment; what else it holds is given to the function.
"""

import json
import sys
from importlib import import_module
from importlib.machinery import PathFinder


class Admitted:
    """Finds the packages of ``folders``, each in its folder, before anything else is looked for."""

    def __init__(self, folders):  # type: ignore[no-untyped-def]
        self._folders = folders

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        folder = self._folders.get(name)
        return None if folder is None else PathFinder.find_spec(name, [folder], target)


def main() -> None:
    sys.path.pop(0)  # the folder of this file, whose module names are nobody else's business
    arguments = json.loads(sys.argv[2])
    sys.argv[:] = [""]  # what is ours is not for the model's parsers of a command line; Triton's has this
    sys.meta_path.insert(0, Admitted(arguments.pop("packages")))  # type: ignore[no-untyped-call]
    module, _, name = arguments.pop("entry").partition(":")
    getattr(import_module(module), name)(**arguments)


if __name__ == "__main__":
    main()
