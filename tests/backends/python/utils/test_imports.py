"""A model's environment may have NumPy and nothing else."""

from __future__ import annotations

import subprocess
import sys

SEEN = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"google", "pluggy", "ml_dtypes", "asyncio", "torch"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
import numpy as np
import triton_python_backend_utils as pb_utils
from headrace.messages.dtypes import BF16

tensor = pb_utils.Tensor._received("x", np.zeros(2, BF16.numpy))
assert tensor.triton_dtype() == 14
assert pb_utils.Tensor.from_dlpack("y", tensor).triton_dtype() == 14
names = {name for name in sys.modules if name.partition(".")[0] == "headrace"}
print(sorted(name for name in names if not name.startswith(("headrace.messages", "headrace.backends"))))
"""


def test_only_numpy_and_the_lightest_parts_of_headrace_are_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, timeout=50, check=False)

    assert done.returncode == 0, done.stderr
    light = ["headrace", "headrace.config", "headrace.config.path_checks", "headrace.config.regular_files"]
    light += ["headrace.errors", "headrace.telemetry", "headrace.telemetry.series"]
    assert done.stdout.strip() == str(light)
