"""Libraries of operators, which a config names: ``model_operations { op_library_filename: "libmine.so" }``.

They are native code for the whole process: TensorFlow unloads no library, and cannot replace a registered operator. So
the same contents are loaded once, wherever they lie, and other contents in the place of a library that a model has
loaded are refused: a second set of kernels would break the served models.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace import LoadError, Model, one_line, read_regular
from headrace_tf.tensorflow_process import log, own_operators, registered_operators, reword

_lock = threading.Lock()
#: The loaded libraries: the digest of each file, and its operators.
_operators: dict[str, frozenset[str]] = {}
#: By the directory of a model: the name and the contents of each library that its versions have loaded.
_contents: dict[tuple[Path, str], str] = {}


def load_libraries(tensorflow: Any, model: Model) -> frozenset[str]:
    """Load the libraries in the config, from the version's directory or the model's. Return their operators.

    Raises `LoadError` naming the file, and `ConfigError` if the config came with a load request: native code is
    loaded from the repository only.
    """
    names = model.config.model_operations.op_library_filename
    if not names:
        return frozenset()
    model.refuse_if_sent(f"op_library_filename '{one_line(names[0])}'", "model_operations.op_library_filename")
    with _lock:
        own_operators()  # the operators before any library adds some
        return frozenset().union(*(_load(tensorflow, model, name) for name in names))


def _load(tensorflow: Any, model: Model, name: str) -> frozenset[str]:
    path = model.resource_or_above(name)
    lead = f"unable to load model '{model.name}': '{path}'"
    try:
        digest = sha256(read_regular(path)).hexdigest()
    except OSError as error:
        raise LoadError(f"{lead}: {error.strerror}") from error
    place = (model.path.parent, name)
    if _contents.get(place, digest) != digest:
        raise LoadError(
            f"{lead} is not the library of that name that this process has loaded, and TensorFlow cannot put the one "
            "in the place of the other: restart the server, or give the instances processes of their own: "
            'parameters { key: "isolation" value { string_value: "process" } }'
        )
    if digest not in _operators:
        before = registered_operators()
        try:
            tensorflow.load_library(str(path))
        except Exception as error:  # TensorFlow's own, and RuntimeError
            raise LoadError(f"{lead}: {reword(error)}") from error
        _operators[digest] = frozenset(registered_operators().keys() - before.keys())
        found = ", ".join(sorted(_operators[digest])) or "no operator that was not there before"
        log.info("model '%s': '%s' has %s", model.name, path, found)
    _contents[place] = digest
    return _operators[digest]
