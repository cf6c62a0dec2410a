from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.options import ServerOptions
from penstock.errors import ConfigError
from penstock.models.configuring import read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('platform: "caffe2"', "unexpected platform type 'caffe2' for m"),
        ('platform: "libtorch"', "unexpected 'platform' and 'backend' pair, got:libtorch, pytorch"),
        ('default_model_filename: "net.bin"', "unexpected platform type '' for m"),
        (
            'name: "other" backend: "identity"',
            "unexpected directory name 'm' for model 'other', directory name must equal model name",
        ),
        ('platform: "ensemble"', "ensemble scheduling must be set for ensemble m whose platform is ensemble"),
    ],
)
def test_a_config_that_names_no_backend_is_refused_before_one_is_looked_for(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "m", ServerOptions())
    assert caught.value.message == message
