"""The backend ``python`` of Headrace: Triton's ``model.py``, unchanged.

A model is a directory with a version in it, and the version holds the code::

    models/double/1/model.py
    models/double/config.pbtxt            # backend: "python", the inputs and the outputs

``model.py`` has a class ``TritonPythonModel`` and imports `triton_python_backend_utils`, which is part of this
distribution, so that a model can be checked and tested without a server. Each instance runs in its own process. To run
instances in threads of the server, set ``--backend-config=python,isolation=thread`` for all models, or a parameter for
one model::

    parameters { key: "isolation" value { string_value: "thread" } }

`headrace_python.parameters.Parameters` lists the other parameters.
"""
