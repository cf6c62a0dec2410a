"""The models of a bundle: which backends they need, and their files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace import ConfigError, Inspector, InvalidArgument, ServerOptions

#: The cache of Python beside an imported model.
_CACHE = "__pycache__"
_FILE = "file://"


@dataclass(frozen=True)
class BundledModel:
    """A model in the folder ``source``, whose copy is ``folder/name`` of the bundle. ``backend`` may be empty."""

    name: str
    source: Path
    folder: str
    backend: str

    def files(self) -> Iterator[tuple[str, Path]]:
        """Yield the path in the bundle and the path here of each file, in order. Links are followed.

        Raises `InvalidArgument` for what cannot be copied, by name.
        """
        for path in _files_below(self.source, (os.path.realpath(self.source),)):
            yield f"{self.folder}/{self.name}/{path.relative_to(self.source).as_posix()}", path


def read_models(repositories: Sequence[str]) -> list[BundledModel]:
    """Return the models of ``repositories``. Configs are checked; no engine is started.

    Raises `HeadraceError` for a repository that cannot be read, is empty, or has a model that could not be loaded.
    """
    models: dict[str, BundledModel] = {}
    for number, repository in enumerate(repositories):
        root = Path(repository.removeprefix(_FILE))
        if "://" in repository.removeprefix(_FILE) or not root.is_dir():
            raise InvalidArgument(f"--model-repository '{repository}' is no directory of this machine")
        folder = "models" if number == 0 else f"models-{number + 1}"
        with Inspector(ServerOptions(model_repository=(str(root),))) as inspector:
            names = sorted(inspector.models())
            if not names:
                raise InvalidArgument(f"--model-repository '{repository}' has no models")
            for name in names:
                if name in models:
                    raise InvalidArgument(f"model '{name}' is in '{models[name].source.parent}' and in '{root}'")
                models[name] = BundledModel(name, root / name, folder, _backend_of(name, inspector))
    return list(models.values())


def _backend_of(name: str, inspector: Inspector) -> str:
    with inspector.open(name) as model:
        found = model.check(has_engines=False)
    if found.problems:
        first = found.problems[0]
        where = f" ({first.field})" if first.field else ""
        raise ConfigError(f"model '{name}'{where}: {first.message}")
    return found.config.backend


def _files_below(folder: Path, parents: tuple[str, ...]) -> Iterator[Path]:
    if (folder / "pyvenv.cfg").exists():
        raise InvalidArgument(
            f"'{folder}' is a virtual environment, which cannot be moved: EXECUTION_ENV_PATH takes a requirements file "
            "or an archive of conda-pack instead, and --requirements adds what models import"
        )
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from error
        if stat.S_ISDIR(mode):
            if entry.name == _CACHE:
                continue
            real = os.path.realpath(path)
            if real in parents:
                raise InvalidArgument(f"'{path}' is a link to a folder that it lies in")
            yield from _files_below(path, (*parents, real))
        elif stat.S_ISREG(mode):
            yield path
        else:
            raise InvalidArgument(f"'{path}' is no regular file")
