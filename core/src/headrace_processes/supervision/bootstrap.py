"""The program of a child process. The interpreter that runs it may be that of the model's own environment.

Arguments: a name for ``ps``, and a JSON object. Its ``entry`` is the function to call. Its ``packages`` are imported
from the server's installation; everything else is imported from the model's environment. All other members are passed
to the function as keyword arguments.
"""

import json
import sys
from importlib import import_module
from importlib.machinery import PathFinder


class PackageFinder:
    """An import finder that finds each package of ``folders`` in its folder, and nothing else."""

    def __init__(self, folders):  # type: ignore[no-untyped-def]
        self._folders = folders

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        folder = self._folders.get(name)
        return None if folder is None else PathFinder.find_spec(name, [folder], target)


def main() -> None:
    sys.path.pop(0)  # the folder of this file: its modules must not be importable by their short names
    arguments = json.loads(sys.argv[2])
    sys.argv[:] = [""]  # as in Triton's processes: a model that parses sys.argv must not see our arguments
    sys.meta_path.insert(0, PackageFinder(arguments.pop("packages")))  # type: ignore[no-untyped-call]
    module, _, name = arguments.pop("entry").partition(":")
    getattr(import_module(module), name)(**arguments)


if __name__ == "__main__":
    main()
