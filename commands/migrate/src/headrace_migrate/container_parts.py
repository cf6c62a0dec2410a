"""The parts of a container of Triton except its command: image, ports, probes, volumes, memory and GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from headrace import distribution_of
from headrace_migrate.images import ImageKind, TritonImage
from headrace_migrate.report import Report, Verdict
from headrace_migrate.text_edits import TextEdits

_IMAGE_PAGE = "docs/containers.md"
_CUDA = "engines for CUDA in the image"
#: Programs that probes call and that a slim image does not have.
_ABSENT_PROGRAMS = ("curl", "wget", "grpc_health_probe", "grpc-health-probe")
_MEMORY_OPTIONS = ("--shm-size", "--ipc", "shm_size", "ipc", "/dev/shm")


@dataclass(frozen=True, slots=True)
class ContainerParts:
    """Reads parts into ``report``; ``image`` replaces Triton's."""

    report: Report
    edits: TextEdits
    image: str

    def read_image(self, found: TritonImage, line: int, span: tuple[int, int] | None) -> None:
        """Report on an image of Triton, and replace that of a server."""
        add = self.report.add
        if found.kind is ImageKind.CLIENT:
            detail = "the clients and perf_analyzer work with Headrace"
            add(line, "image", found.name, Verdict.AS_IT_IS, detail, "docs/from-triton.md#what-is-the-same")
        elif found.kind is ImageKind.BASE:
            detail = "a base for builds of Triton: build an image of Headrace instead"
            add(line, "image", found.name, Verdict.DIFFERS, detail, _IMAGE_PAGE)
        elif found.kind is ImageKind.ENGINE:
            detail = f"the backend '{found.engine}' has no distribution yet"
            add(line, "image", found.name, Verdict.NOT_THERE, detail, "docs/backends.md")
        else:
            if found.distribution:
                self.report.distributions.add(found.distribution)
            add(line, "image", found.name, Verdict.CHANGED, f"now {self.image}: build it", _IMAGE_PAGE)
            if span is not None:
                self.edits.replace(*span, self.image)

    def read_own_image(self, name: str, line: int) -> None:
        """Report on an image of the user's that runs Triton's program."""
        detail = "an image of your own: migrate its Dockerfile"
        self.report.add(line, "image", name, Verdict.DIFFERS, detail, _IMAGE_PAGE)

    def read_port(self, port: str, line: int) -> None:
        self.report.add(line, "port", port, Verdict.AS_IT_IS)

    def read_volume(self, path: str, line: int) -> None:
        """Report on a mount at ``path``."""
        if path.rstrip("/") == "/dev/shm":
            self.read_shared_memory(path, line)
        elif path.startswith("/opt/tritonserver/backends"):
            page = "docs/python-environments.md#python-based-backends"
            self.report.add(line, "volume", path, Verdict.DIFFERS, "python-based backends only", page)
        else:
            self.report.add(line, "volume", path, Verdict.AS_IT_IS)

    def read_shared_memory(self, name: str, line: int) -> None:
        detail = "only for clients' shared memory: models use none of it"
        self.report.add(line, "memory", name, Verdict.AS_IT_IS, detail, "docs/shared-memory.md")

    def read_gpus(self, name: str, line: int) -> None:
        self.report.add(line, "resources", name, Verdict.NEEDS, _CUDA, "docs/containers.md#choose-what-is-inside")

    def read_path(self, path: str, line: int) -> None:
        """Report on the path of a probe."""
        if path.startswith("/api/"):
            detail = "Triton's first protocol: ask /v2/health/ready or /v2/health/live"
            self.report.add(line, "probe", path, Verdict.NOT_THERE, detail, "docs/kubernetes.md")
        else:
            self.report.add(line, "probe", path, Verdict.AS_IT_IS)

    def read_probe_command(self, command: str, line: int) -> None:
        """Report on the program that a probe runs in the container."""
        absent = next((name for name in _ABSENT_PROGRAMS if name in command), "")
        if absent:
            detail = f"the image has no {absent}: let the probe ask by HTTP or gRPC"
            self.report.add(line, "probe", command, Verdict.DIFFERS, detail, "docs/kubernetes.md")
        else:
            self.report.add(line, "probe", command, Verdict.AS_IT_IS)

    def read_option(self, name: str, value: str, line: int) -> None:
        """Report on an option of ``docker run``, or a field of Compose with its name."""
        if name in ("--gpus", "--runtime"):
            self.read_gpus(f"{name} {value}", line)
        elif name in ("-p", "--publish"):
            self.read_port(value, line)
        elif name in ("-v", "--volume"):
            self.read_volume(value.split(":")[1] if ":" in value else value, line)
        elif name in _MEMORY_OPTIONS:
            self.read_shared_memory(f"{name} {value}", line)
        elif name == "--mount":
            targets = (part.partition("=")[2] for part in value.split(",") if part.startswith(("dst=", "target=")))
            self.read_volume(next(targets, value), line)

    def read_engine(self, name: str, line: int) -> None:
        """Report on a model format that a runtime of KServe names."""
        backend = {"onnx": "onnxruntime", "pytorch": "pytorch", "tensorflow": "tensorflow", "tensorrt": "tensorrt"}
        own = distribution_of("backend", backend.get(name, name))
        if own:
            self.report.need(line, "format", name, own, "docs/backends.md")
        else:
            self.report.add(line, "format", name, Verdict.AS_IT_IS)
