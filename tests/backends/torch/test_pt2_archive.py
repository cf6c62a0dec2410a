"""Files called model.pt2 that hold something else, or nothing that can be read."""

from __future__ import annotations

import contextlib
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export.pt2_archive._package import package_pt2

from headrace import ConfigError, HeadraceError, LoadError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


class Doubled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


@pytest.fixture
def path(programs: Any) -> Path:
    return Path(programs.save(Doubled(), torch.ones(3)))


def refused(programs: Any, message: str) -> None:
    with pytest.raises(LoadError, match=rf"failed to load model 'm': '.*model\.pt2' .*{message}"):
        programs.load()


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "no zip"), (b"no model", "no zip"), (b"PK\x05\x06" + bytes(18), "holds nothing")]
)
def test_a_file_that_is_no_archive_is_refused(programs: Any, path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    refused(programs, message)


def test_a_truncated_program_is_named(programs: Any, path: Path) -> None:
    content = path.read_bytes()
    for size in (len(content) - 100, len(content) // 2, 100):
        path.write_bytes(content[:size])
        refused(programs, "(is no zip archive|is a pickle of torch.save)")  # the samples in it are one, and whole


@pytest.mark.parametrize("place", range(0, 6000, 211))
def test_damage_anywhere_is_a_load_error_or_none(programs: Any, path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= 0x55
    path.write_bytes(content)
    with contextlib.suppress(LoadError):
        programs.load()


def test_the_error_for_torchscript_has_a_hint(programs: Any, path: Path, write_script: Callable[..., Path]) -> None:
    write_script(Doubled(), path)
    refused(programs, "is TorchScript: call it model.pt")


def test_a_pickle_is_no_program(programs: Any, path: Path) -> None:
    torch.save(Doubled().state_dict(), path)
    refused(programs, "is a pickle of torch.save")


def test_another_zip_is_no_program(programs: Any, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme\n.txt", "hello")
    refused(programs, r"is neither a program .* it holds readme\\n.txt")


def test_the_error_for_an_old_program_has_the_remedy(programs: Any, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
    refused(programs, "export it again with PyTorch 2.8 or later")


@pytest.mark.parametrize("name", ["../outside", "/etc/x", "m/../../x", "m\\..\\x"])
def test_a_name_outside_of_the_archive_is_refused(programs: Any, path: Path, rewrite: Any, name: str) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, "x")
    refused(programs, "outside of itself")


def test_a_bomb_is_refused_before_it_is_opened(programs: Any, path: Path) -> None:
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data/bomb", bytes(50_000_000))
    refused(programs, "compressed entry 'model/data/bomb', and PyTorch compresses none")


def test_entries_upon_each_other_are_refused(programs: Any, path: Path) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        large = zipfile.ZipInfo("model/data/large")
        archive.writestr(large, bytes(100_000))
        for number in range(3):
            again = zipfile.ZipInfo(f"model/data/again{number}")
            again.header_offset, again.file_size, again.compress_size = large.header_offset, 100_000, 100_000
            again.CRC = large.CRC
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
        archive._didModify = True  # type: ignore[attr-defined]
    refused(programs, "entries that overlap")


def test_an_entry_twice_is_refused(programs: Any, path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("model/models/model.json", "{}")
    refused(programs, "two entries 'model/models/model.json'")


def changed(change: Callable[[Any], None]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        document = json.loads(data)
        change(document)
        return json.dumps(document).encode()

    return apply


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("models/model.json", b"{", "damaged at 'models/model.json'"),
        ("models/model.json", b"[" * 100_000, "damaged at 'models/model.json'"),
        ("models/model.json", b"[]", "no program of torch.export that can be read"),
        ("models/model.json", b"{}", "can be read: KeyError 'schema_version'"),
        ("models/model.json", lambda data: data.replace(b'"major": 8', b'"major": 9'), "version 9 of the schema"),
        ("models/model.json", lambda data: data.replace(b'"as_tensor"', b'"as_else"'), "can be read"),
        ("models/model.json", lambda data: data.replace(b'{"name": "mul"}', b'{"name": "x2"}'), "can be read"),
        ("weights_config.json", lambda data: data.replace(b'"as_int": 3', b'"as_int": 4'), "out of bounds|setStorage"),
        ("weights_config.json", lambda data: data.replace(b'"dtype": 7', b'"dtype": 70'), "KeyError 70"),
        ("weights_config.json", lambda data: data.replace(b'"by"', b'"other"'), "has no 'by' in its weights"),
        ("weights_config.json", lambda data: data.replace(b"weight_0", b"weight_7"), "has no 'data/weights/weight_7'"),
        ("weight_0", b"abc", "."),
        ("weight_0", b"", "has no content"),
        ("byteorder", b"big", "another byte order, big"),
    ],
)
def test_an_invalid_program_is_refused(
    programs: Any, path: Path, rewrite: Any, name: str, change: Any, message: str
) -> None:
    rewrite(path, {name: change})
    refused(programs, message)


#: What a value in a document may become.
OTHERS: list[Any] = [
    None,
    0,
    -1,
    10**30,
    "",
    "x",
    "as_tensor",
    [],
    {},
    [[]],
    {"as_int": 1},
    True,
    1.5,
    {"as_none": True},
]


def values_in(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document that holds a value: its container, and the key or the index there."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from values_in(node[key])


@pytest.mark.parametrize("seed", range(60))
def test_a_changed_document_is_refused_or_served(programs: Any, path: Path, rewrite: Any, seed: int) -> None:
    chance = random.Random(seed)

    def change(document: Any) -> None:
        container, key = chance.choice(list(values_in(document)))
        container[key] = chance.choice(OTHERS)

    rewrite(path, {chance.choice(["model.json", "model.json", "weights_config.json"]): changed(change)})
    with contextlib.suppress(LoadError, ConfigError):
        instance = programs.load()
        with contextlib.suppress(HeadraceError):
            instance.execute({io.name: np.ones(3, np.float32) for io in programs.config.input})


def test_two_programs_in_one_file_need_a_name(programs: Any, path: Path, rewrite: Any) -> None:
    program = torch.export.export(Doubled(), (torch.ones(3),))
    package_pt2(str(path), exported_programs={"a": program, "b": program})
    refused(programs, "has 2 programs, and none is called 'model': a, b")
    package_pt2(str(path), exported_programs={"a": program, "model": program})
    programs.load()


def test_trust_loads_a_program_with_code_of_its_own(programs: Any, path: Path, rewrite: Any) -> None:
    rewrite(path, {"models/model.json": lambda data: data.replace(b'"major": 8', b'"major": 9')})
    with pytest.raises(LoadError, match="version 9 of the schema"):
        programs.load(trust=True)
