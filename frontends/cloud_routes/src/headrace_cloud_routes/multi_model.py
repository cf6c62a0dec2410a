"""SageMaker's endpoints of several models: list, load, unload. The platform has put their files on this machine.

Source: docs/spec/behaviours.md section 12.5. Control mode ``explicit`` is needed, as in Triton.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any, ClassVar, Protocol

from headrace import (
    AlreadyExists,
    Engine,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    Operation,
    ResourceExhausted,
    read_config,
)

#: Where the platform puts models. No other directory is read.
ROOT = "/opt/ml/models"
_MODEL = re.compile(r"/([0-9A-Za-z._-]+)/model(?:/([0-9A-Za-z._-]+))?/?")
_JSON = ((b"Content-Type", b"application/json"),)
#: Texts of engines that have no memory left. SageMaker then unloads other models, and tries again.
_NO_MEMORY = re.compile(r"out of memory|cannot allocate memory|failed to allocate|bad_alloc|MemoryError", re.IGNORECASE)
#: The longest wait for the requests of a model that is unloaded, in seconds: SageMaker's own limit is 360.
UNLOAD_S = 350


class Models:
    """The models that were loaded over the port: by name, the directory that the caller sent, and its repository."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.urls: dict[str, str] = {}
        self._repositories: dict[str, str] = {}
        self._loads: set[asyncio.Task[None]] = set()

    async def load(self, name: str, url: str) -> None:
        """Load the model in the directory ``url`` as ``name``. A caller that disconnects does not stop the load.

        Raises `HeadraceError`.
        """
        if name in self.urls:
            raise AlreadyExists(f"model '{name}' has already been loaded")
        if not name or name in (".", "..") or "/" in name or "\0" in name or name != name.strip():
            raise InvalidArgument(
                f"invalid model name '{name}': it must be one segment of a path without blanks around"
            )
        load = asyncio.create_task(self._load(name, url))
        self._loads.add(load)
        load.add_done_callback(self._loads.discard)
        await asyncio.shield(load)

    async def _load(self, name: str, url: str) -> None:
        repository, names = await asyncio.to_thread(find_repository, name, url)
        await self._engine.register_repository(repository, names)
        try:
            await self._engine.load(name)
        except HeadraceError:
            await self._engine.unregister_repository(repository)
            raise
        self.urls[name], self._repositories[name] = url, repository

    async def unload(self, name: str) -> None:
        """Unload ``name``, one of `urls`, and wait until its requests are answered, at most `UNLOAD_S`."""
        await self._engine.unload(name, unload_dependents=True)
        del self.urls[name]
        repository = self._repositories.pop(name)
        deadline = asyncio.get_running_loop().time() + UNLOAD_S
        while self._is_unloading(name) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await self._engine.unregister_repository(repository)

    def _is_unloading(self, name: str) -> bool:
        return any(entry.name == name and entry.state == "UNLOADING" for entry in self._engine.index())


def find_repository(name: str, url: str) -> tuple[str, dict[str, str]]:
    """Return the repository of the model in the directory ``url``, and the directory of each of its models by name.

    A directory with a config or with versions is the model ``name``. Else it has a directory per model: ``name`` is the
    only one, the ensemble among them, or the one of this name. Blocks. Raises `InvalidArgument` for a directory that is
    not the platform's.
    """
    found = _MODEL.fullmatch(url.removeprefix(ROOT)) if url.startswith(ROOT) else None
    if not found or {".", ".."} & {found[1], found[2]}:
        raise InvalidArgument(f"url '{url}' is refused: it is no directory in which SageMaker puts a model")
    directory = Path(url.rstrip("/"))
    if os.path.realpath(directory) != str(Path(os.path.realpath(ROOT)) / directory.relative_to(ROOT)):
        raise InvalidArgument(f"url '{url}' is refused: it leads to another directory by a link")
    if not directory.is_dir():
        raise InvalidArgument(f"failed to register '{url}', repository not found")
    inside = sorted(entry.name for entry in os.scandir(directory) if entry.is_dir() and entry.name[0] != ".")
    if (directory / "config.pbtxt").is_file() or any(each.isdigit() for each in inside):
        return str(directory.parent), {name: directory.name}
    named = inside if len(inside) == 1 else [each for each in inside if _is_ensemble(directory / each / "config.pbtxt")]
    if len(named) == 1:
        return str(directory), {**{each: each for each in inside if each != named[0]}, name: named[0]}
    if name in inside:
        return str(directory), {each: each for each in inside}
    raise InvalidArgument(f"failed to load '{name}': the directory has no model of this name, and more than one model")


def _is_ensemble(config_file: Path) -> bool:
    try:
        config = read_config(config_file)
    except (HeadraceError, OSError):  # loading it says what is wrong
        return False
    return config.platform == "ensemble" or config.HasField("ensemble_scheduling")


class HasModels(Protocol):
    """The port of these routes."""

    models: Models


class _Route(HttpRoute):
    extension: HasModels
    operation: ClassVar[Operation] = Operation.INDEX

    @property
    def models(self) -> Models:
        return self.extension.models


class ListModels(_Route):
    name = "GET /models[/]"

    async def answer(self, call: HttpCall) -> HttpReply:
        return _document({"models": [_model(name, url) for name, url in self.models.urls.items()]})


class DescribeModel(_Route):
    name = "GET /models/{name}"

    async def answer(self, call: HttpCall) -> HttpReply:
        name = call.values["name"]
        url = self.models.urls.get(name)
        return HttpReply(404) if url is None else _document(_model(name, url))


class AskUnknownModel(_Route):
    """An inference of a model that is not loaded. Admitted as any other: who may not use it learns nothing."""

    name = "POST /models/{name}/invoke"
    operation = Operation.INFER

    async def answer(self, call: HttpCall) -> HttpReply:
        return HttpReply(404)


class LoadModel(_Route):
    name = "POST /models[/]"
    operation = Operation.LOAD

    async def answer(self, call: HttpCall) -> HttpReply:
        try:
            asked = await call.read_json()
            if not isinstance(asked, dict):
                raise InvalidArgument("the body is no JSON object")
            name, url = (call.read_member(asked, key, str) for key in ("model_name", "url"))
            call.caller.note(model=name, url=url)
            await self.models.load(name, url)
        except HeadraceError as error:
            return _refusal(call, error)
        return HttpReply(200)


class UnloadModel(_Route):
    name = "DELETE /models/{name}"
    operation = Operation.UNLOAD

    async def answer(self, call: HttpCall) -> HttpReply:
        if call.values["name"] not in self.models.urls:
            return HttpReply(404)
        call.caller.note(unload_dependents=True)
        await self.models.unload(call.values["name"])
        return HttpReply(200)


def _document(value: Any) -> HttpReply:
    return HttpReply(200, _JSON, [json.dumps(value, separators=(",", ":")).encode()])


def _model(name: str, url: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": url}


def _refusal(call: HttpCall, error: HeadraceError) -> HttpReply:
    """Return the answer to a load that failed: 409, 507 and 400 are what SageMaker acts on."""
    has_no_memory = isinstance(error, ResourceExhausted) or _NO_MEMORY.search(error.message)
    status = 409 if isinstance(error, AlreadyExists) else 507 if has_no_memory else 400
    return HttpReply(status, _JSON, [call.print_error(error)])
