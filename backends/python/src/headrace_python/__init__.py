"""The backend ``python`` of Headrace: Triton's ``model.py``, unchanged.

A model is a directory with a version in it, and the version holds the code::

    models/double/1/model.py
    models/double/config.pbtxt            # backend: "python", the inputs and the outputs

``model.py`` has a class ``TritonPythonModel`` and imports `triton_python_backend_utils`, which this
distribution brings along, so that a model can be checked and tested without a server. Each instance
runs in a process of its own. ``--backend-config=python,isolation=thread`` lets all run in threads of
the server, and so does the parameter ``isolation`` of a model, for itself::

    parameters { key: "isolation" value { string_value: "thread" } }

`headrace_python.parameters.Parameters` lists what else a config may say.
"""
