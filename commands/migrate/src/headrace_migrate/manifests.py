"""Manifests in YAML: Kubernetes, KServe, Docker Compose, and the values of a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import yaml

from headrace_migrate.container_parts import ContainerParts
from headrace_migrate.images import ImageKind, triton_image
from headrace_migrate.report import Report, Verdict
from headrace_migrate.server_commands import PlacedWord, ServerCommands
from headrace_migrate.shell_commands import PROGRAM, program_at
from headrace_migrate.shell_scripts import ShellScripts, script_of
from headrace_migrate.shell_words import Word
from headrace_migrate.yaml_documents import field_at, fields_of, items_of, line_of, nodes_of, text_of

_PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
_KSERVE = "docs/migrating.md#kserve"
_REPOSITORY_FLAGS = ("--model-repository", "--model-store")


class Manifests:
    """Reads documents into ``report``, and adds the changes to the edits of ``parts``."""

    def __init__(self, report: Report, commands: ServerCommands, parts: ContainerParts) -> None:
        self._report, self._commands, self._parts = report, commands, parts
        self._edits = parts.edits
        self._scripts = ShellScripts(commands, parts)
        self._read_sequences = set[int]()
        #: True if anything of Triton was found.
        self.found = False

    def read(self, roots: Iterable[yaml.Node]) -> None:
        """Report on every document. Raises `BadInput`."""
        for root in roots:
            nodes = list(nodes_of(root))
            for node in nodes:
                self._read_container(node)
            for node in nodes:
                self._read_rest(node)
            if text_of(field_at(root, "kind")) == "InferenceService":
                self._read_inference_service(root)
            for each in items_of(field_at(root, "spec", "supportedModelFormats")) if self.found else ():
                self._parts.read_engine(text_of(field_at(each, "name")), line_of(each))

    # ------------------------------------------------------------------ containers

    def _read_container(self, node: yaml.Node) -> None:
        fields = fields_of(node)
        image = fields.get("image")
        name = text_of(image)
        lists = [fields[key] for key in ("entrypoint", "command", "args") if key in fields]
        found = triton_image(name)
        calls = any(PROGRAM in word for each in lists for word in self._texts(each))
        if found is None and not (calls and image is not None):
            return
        self.found = True
        if image is not None and found is not None:
            self._parts.read_image(found, line_of(image), self._span(image))
        elif image is not None and isinstance(image, yaml.ScalarNode):
            self._parts.read_own_image(name, line_of(image))
        self._read_command(lists)
        self._read_environment(fields)
        self._read_ports(fields)
        self._read_volumes(fields)
        self._read_probes(fields)
        self._read_memory(fields)
        if found is not None and found.kind is ImageKind.CLIENT:
            self._commands.found += 1

    @staticmethod
    def _texts(node: yaml.Node) -> list[str]:
        return [text_of(node)] if isinstance(node, yaml.ScalarNode) else [text_of(item) for item in items_of(node)]

    def _read_command(self, lists: Sequence[yaml.Node]) -> None:
        words = list[PlacedWord]()
        items = list[yaml.Node]()
        for each in lists:
            self._read_sequences.add(id(each))
            if isinstance(each, yaml.ScalarNode):  # Compose: a text for a shell
                self._read_script(each, text_of(each))
                continue
            items += items_of(each)
        words = [self._placed(item) for item in items]
        script = script_of([word.text for word in words])
        if script is not None:
            self._read_script(items[script], words[script].text)
            return
        for index in self._commands.read(words):
            self._drop_item(items, index)

    def _read_script(self, node: yaml.Node, source: str) -> None:
        """Report on a script in a scalar. Its words have places if they are in the file as they are."""
        start, end = node.start_mark.index, node.end_mark.index
        offset = self._edits.text.find(source, start, end)

        def locate(word: Word) -> PlacedWord:
            if offset >= 0:
                span = offset + word.start, offset + word.end
                return PlacedWord(word.text, self._edits.line_of(span[0]), span)
            written = source[word.start : word.end]
            at = self._edits.text.find(written, start, end)
            if at < 0 or self._edits.text.find(written, at + 1, end) >= 0:  # not there, or twice
                return PlacedWord(word.text, line_of(node), None)
            return PlacedWord(word.text, self._edits.line_of(at), (at, at + len(written)))

        self._scripts.read(source, locate)

    def _drop_item(self, items: Sequence[yaml.Node], index: int) -> None:
        """Remove an item from its sequence: its line, or the item with its comma."""
        text, node = self._edits.text, items[index]
        start, end = node.start_mark.index, node.end_mark.index
        head = text.rfind("\n", 0, start) + 1
        if text[head:start].strip() == "-":
            stop = text.find("\n", end)
            self._edits.replace(head, len(text) if stop < 0 else stop + 1, "")
        elif (comma := text.rfind(",", 0, start)) >= 0 and not text[comma + 1 : start].strip():
            self._edits.replace(comma, end, "")
        else:
            after = text.find(",", end)
            stop = after + 1 if after >= 0 and not text[end:after].strip() else end
            self._edits.replace(start, stop + (text[stop : stop + 1] == " " and stop > end), "")

    def _placed(self, node: yaml.Node) -> PlacedWord:
        return PlacedWord(text_of(node), line_of(node), (node.start_mark.index, node.end_mark.index))

    def _span(self, node: yaml.Node) -> tuple[int, int] | None:
        """Return the place of the text of a scalar without its quotation marks; None if it is written otherwise."""
        start, end = node.start_mark.index, node.end_mark.index
        value = text_of(node)
        at = self._edits.text.find(value, start, end)
        return None if at < 0 else (at, at + len(value))

    # ------------------------------------------------------------------ what is beside the command

    def _read_environment(self, fields: dict[str, yaml.Node]) -> None:
        for each in items_of(fields.get("env")):
            name = text_of(field_at(each, "name"))
            self._commands.read_variable(name, text_of(field_at(each, "value")), line_of(each))
        environment = fields.get("environment")
        for name, value in fields_of(environment).items():
            self._commands.read_variable(name, text_of(value), line_of(value))
        for each in items_of(environment):
            self._commands.read_variable(*text_of(each).partition("=")[::2], line_of(each))

    def _read_ports(self, fields: dict[str, yaml.Node]) -> None:
        for each in items_of(fields.get("ports")):
            port = text_of(field_at(each, "containerPort")) or text_of(field_at(each, "target")) or text_of(each)
            self._parts.read_port(port, line_of(each))

    def _read_volumes(self, fields: dict[str, yaml.Node]) -> None:
        for each in items_of(fields.get("volumeMounts")):
            self._parts.read_volume(text_of(field_at(each, "mountPath")), line_of(each))
        for each in items_of(fields.get("volumes")):
            path = text_of(field_at(each, "target")) or ":".join(text_of(each).split(":")[1:2])
            if path:
                self._parts.read_volume(path, line_of(each))

    def _read_probes(self, fields: dict[str, yaml.Node]) -> None:
        for name in _PROBES:
            probe = fields.get(name)
            path, words = field_at(probe, "httpGet", "path"), field_at(probe, "exec", "command")
            if path is not None:
                self._parts.read_path(text_of(path), line_of(path))
            elif words is not None:
                self._parts.read_probe_command(" ".join(self._texts(words)), line_of(words))
            elif probe is not None:
                self._report.add(line_of(probe), "probe", name, Verdict.AS_IT_IS)
        test = field_at(fields.get("healthcheck"), "test")
        if test is not None:
            self._parts.read_probe_command(" ".join(self._texts(test)), line_of(test))

    def _read_memory(self, fields: dict[str, yaml.Node]) -> None:
        for name in ("shm_size", "ipc"):
            if name in fields:
                self._parts.read_shared_memory(name, line_of(fields[name]))
        resources = fields.get("resources")
        wanted = {**fields_of(field_at(resources, "requests")), **fields_of(field_at(resources, "limits"))}
        for name, value in wanted.items():
            if name.endswith("/gpu"):
                self._parts.read_gpus(f"{name}: {text_of(value)}", line_of(value))
            else:
                self._report.add(line_of(value), "resources", f"{name}: {text_of(value)}", Verdict.AS_IT_IS)
        devices = field_at(fields.get("deploy"), "resources", "reservations", "devices")
        for node in (devices, fields.get("runtime"), fields.get("gpus")):
            if node is not None:
                self._parts.read_gpus(text_of(node) or "devices", line_of(node))

    # ------------------------------------------------------------------ charts and KServe

    def _read_rest(self, node: yaml.Node) -> None:
        """Report on names of images and lists of flags in the values of a chart."""
        if isinstance(node, yaml.MappingNode):
            fields = fields_of(node)
            repository, tag = fields.get("repository"), fields.get("tag")
            if repository is not None and tag is not None and triton_image(text_of(repository)):
                self._read_split_image(repository, tag)
            for key, value in fields.items():
                name = text_of(value)
                if key not in ("image", "repository", "name") and ":" in name and (found := triton_image(name)):
                    self.found = True
                    self._parts.read_image(found, line_of(value), self._span(value))
            return
        words = [text_of(item) for item in items_of(node)]
        if id(node) in self._read_sequences or not words:
            return
        if program_at(words) is not None or (script_of(words) is not None and PROGRAM in " ".join(words)):
            self.found = True
            self._read_command([node])
        elif any(word.startswith(_REPOSITORY_FLAGS) for word in words):
            self.found = True
            items = items_of(node)
            for index in self._commands.read_flags([self._placed(item) for item in items]):
                self._drop_item(items, index)

    def _read_split_image(self, repository: yaml.Node, tag: yaml.Node) -> None:
        self.found = True
        found = triton_image(f"{text_of(repository)}:{text_of(tag)}")
        if found is None:
            return
        self._parts.read_image(found, line_of(repository), None)
        if found.kind is ImageKind.SERVER:
            path, slash, last = self._parts.image.rpartition("/")
            name, _, version = last.partition(":")
            for node, new in ((repository, path + slash + name), (tag, version or "latest")):
                if (span := self._span(node)) is not None:
                    self._edits.replace(*span, new)

    def _read_inference_service(self, root: yaml.Node) -> None:
        predictor = field_at(root, "spec", "predictor")
        old, model = field_at(predictor, "triton"), field_at(predictor, "model")
        if old is not None:
            self.found = True
            detail = "KServe's own image of Triton: name a runtime with Headrace's image"
            self._report.add(line_of(old), "predictor", "triton", Verdict.DIFFERS, detail, _KSERVE)
            if (uri := field_at(old, "storageUri")) is not None:
                self._report.add(line_of(uri), "storage", text_of(uri), Verdict.AS_IT_IS, "KServe fetches it", _KSERVE)
            if (words := field_at(old, "args")) is not None and id(words) not in self._read_sequences:
                self._commands.read_flags([self._placed(item) for item in items_of(words)])
            self._read_memory(fields_of(old))
        runtime, format_name = text_of(field_at(model, "runtime")), text_of(field_at(model, "modelFormat", "name"))
        if model is not None and (PROGRAM in runtime or "triton" in (runtime, format_name)):
            self.found = True
            detail = "its ServingRuntime names the image: migrate that"
            name = runtime or f"modelFormat {format_name}"
            self._report.add(line_of(model), "runtime", name, Verdict.DIFFERS, detail, _KSERVE)
            self._read_memory(fields_of(model))
