"""``headrace encrypt``: writes an encrypted copy of a model."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headrace import Command, HeadraceError, LoadError, one_line, open_regular
from headrace_decrypt.decrypt_agent import CONFIGS, SUFFIX, Decrypt, create, is_plain, make_folders, plain_patterns

if TYPE_CHECKING:
    from headrace_decrypt.file_format import Header


class Encrypt(Command):
    name = "encrypt"
    help = "encrypt a model for the agent 'decrypt'"
    synopsis = "<model> <target> (--key-file FILE | --key-env NAME) [options]"
    description = (
        "Write an encrypted copy of the model directory <model> to the new directory <target>. "
        "All files are encrypted, except the config and those of --plain."
    )
    example = "headrace encrypt plain/digits models/digits --key-file /etc/headrace/model-keys"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("model", help="the directory of the model, with its config.pbtxt")
        parser.add_argument("target", help="the directory to write, which must not exist")
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("--key-file", metavar="FILE", help="the file with the keys, private to its owner")
        source.add_argument("--key-env", metavar="NAME", help="the environment variable with the keys")
        parser.add_argument("--key-id", metavar="ID", help="the key to encrypt with; default: the first")
        parser.add_argument(
            "--plain",
            metavar="PATTERN,...",
            default="",
            help="files that stay unencrypted, such as labels.txt; the config names the same in parameter 'plain'",
        )

    def run(self, arguments: argparse.Namespace) -> int:
        """Write the copy beside ``target``, and move it there when it is complete."""
        from headrace_decrypt.file_format import Header, new_package_id
        from headrace_decrypt.model_keys import KeySource

        model, target = Path(arguments.model), Path(arguments.target)
        partial: Path | None = None
        try:
            parameters = _parameters(arguments)
            keys = KeySource.parse(parameters).read()
            key_id = arguments.key_id or next(iter(keys.by_id))
            key = keys.get(key_id)
            _require(model, target)
            # A server ignores hidden directories of its repository, so it does not load half a model.
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
            header = Header.create(key, key_id, new_package_id())
            count = _encrypt_files(model, partial, header, key, plain_patterns(arguments.plain))
            partial.chmod(0o777 & ~_umask())
            partial.rename(target)
            partial = None
        except (HeadraceError, OSError) as error:
            message = (
                error.message if isinstance(error, HeadraceError) else f"{error.filename or target}: {error.strerror}"
            )
            print(f"headrace encrypt: {one_line(message)}", file=sys.stderr)
            return 1
        finally:
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
        files = "1 file" if count == 1 else f"{count} files"
        print(f"{files} of '{model}' encrypted with key '{key_id}' in '{target}'")
        _show_missing_agent(target, parameters)
        return 0


def _parameters(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the parameters of the agent that decrypts what ``arguments`` encrypt."""
    parameters = {"key_env": arguments.key_env, "plain": arguments.plain}
    if arguments.key_file is not None:
        parameters["key_file"] = str(Path(arguments.key_file).absolute())
    return {key: value for key, value in parameters.items() if value}


def _require(model: Path, target: Path) -> None:
    """Raise `LoadError` unless ``model`` can be encrypted to ``target``."""
    if not any(next(model.glob(pattern), None) for pattern in CONFIGS):
        raise LoadError(f"'{model}' has no config.pbtxt, which must name the agent '{Decrypt.name}'")
    if target.exists() or target.is_symlink():
        raise LoadError(f"'{target}' exists already")
    if not target.parent.is_dir():
        raise LoadError(f"the directory '{target.parent}' of the target does not exist")
    if target.resolve().is_relative_to(model.resolve()):
        raise LoadError(f"'{target}' is inside of the model")


def _encrypt_files(model: Path, target: Path, header: Header, key: bytes, plain: tuple[str, ...]) -> int:
    """Encrypt the files of ``model`` to ``target``, or copy those of ``plain``. Return how many are encrypted."""
    from headrace_decrypt.file_format import encrypt

    count = 0
    for path in make_folders(model, target):
        if path.endswith(SUFFIX):
            raise LoadError(f"file '{path}' of the model ends with {SUFFIX}: is it encrypted already?")
        with open_regular(model / path) as source:
            if is_plain(path, plain):
                with create(target / path, source) as copied:
                    shutil.copyfileobj(source, copied)
                shutil.copymode(model / path, target / path)
                continue
            with create(target / (path + SUFFIX), source) as encrypted:
                encrypt(source, encrypted, header, key, path)
            shutil.copymode(model / path, target / (path + SUFFIX))
            count += 1
    return count


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _show_missing_agent(target: Path, parameters: dict[str, str]) -> None:
    """Print what the config must have, if it does not name the agent."""
    configs = [path for pattern in CONFIGS for path in target.glob(pattern)]
    missing = [
        path for path in configs if f'"{Decrypt.name}"' not in path.read_text(encoding="utf-8", errors="replace")
    ]
    if missing:
        text = "".join(f' parameters {{ key: "{key}" value: "{value}" }}' for key, value in parameters.items())
        print(f"To load it, add to {', '.join(map(str, missing))}:")
        print(f'model_repository_agents {{ agents {{ name: "{Decrypt.name}"{text} }} }}')
