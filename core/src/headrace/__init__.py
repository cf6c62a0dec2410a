"""Headrace: an inference server that pip installs, and that replaces Triton.

Serve a repository from Python, without a port::

    import headrace

    with headrace.Server("models") as server:
        answer = server.infer("digits", {"image": pixels})
        answer.outputs["scores"]

Write a backend: subclass `Backend` and `Instance`, return the backend from a function marked `hookimpl`, and name the
module in an entry point of the group ``headrace``. Only the names exported here are stable; everything else may change
between minor versions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.agents.base import RepositoryAgent
    from headrace.backends.base import (
        AnyInstance,
        Backend,
        Call,
        DeferredInstance,
        Device,
        DeviceKind,
        Instance,
        Isolation,
        Model,
        RequestInstance,
        StreamInstance,
        Tensors,
    )
    from headrace.backends.cores import available_cores
    from headrace.backends.services import LOG_LEVELS, LogLevel, LoopServices, Services
    from headrace.backends.sharing import Shared
    from headrace.caches.base import CachedResponse, ResponseCache
    from headrace.caches.packing import pack_response, unpack_response
    from headrace.command import Command
    from headrace.config.completed_fields import CompletedField, names_all_tensors
    from headrace.config.config_json import config_to_json
    from headrace.config.derive import padding_inputs
    from headrace.config.model_config_pb2 import (
        ModelConfig,
        ModelEnsembling,
        ModelInput,
        ModelInstanceGroup,
        ModelOutput,
        ModelSequenceBatching,
    )
    from headrace.config.option_groups import OptionGroup
    from headrace.config.options import ServerOptions
    from headrace.config.parameters import parse_parameters, read_isolation, read_load_timeout
    from headrace.config.parse import read_config
    from headrace.config.path_checks import one_line, why_path_leaves
    from headrace.config.regular_files import in_memory, open_regular, read_regular
    from headrace.config.validation import Problem, check_shape
    from headrace.distributions import distribution_of
    from headrace.engine import (
        AnyOperation,
        Caller,
        Engine,
        ExtensionOperation,
        Interceptor,
        Meter,
        ModelView,
        Operation,
        Outcome,
        RequestSubmitter,
        Watch,
    )
    from headrace.errors import (
        AlreadyExists,
        BackendError,
        CallerError,
        Cancelled,
        Code,
        ConfigError,
        HeadraceError,
        InternalError,
        InvalidArgument,
        LoadError,
        NotFound,
        PermissionDenied,
        Rescheduled,
        ResourceExhausted,
        Unauthenticated,
        Unavailable,
        Unsupported,
    )
    from headrace.executors.executor import BatchSource, Executor, RunsOn
    from headrace.executors.kind import ExecutorKind, ExecutorResources, InstancePlan
    from headrace.executors.output_schema import OutputSchema
    from headrace.executors.threads import LoopWakeup
    from headrace.executors.warmup import WarmupSample
    from headrace.frontends.base import Frontend
    from headrace.frontends.extension import Addition, Extension
    from headrace.frontends.request_parameters import RequestParameters
    from headrace.hookspecs import hookimpl
    from headrace.memory_release import release_memory, share_heap
    from headrace.messages import dtypes
    from headrace.messages.device_tensor import DeviceTensor, StackedTensors, on_host
    from headrace.messages.dtypes import DataType
    from headrace.messages.request import InferRequest, Parameter
    from headrace.messages.response import Answer, InferResponse
    from headrace.messages.spec import Spec
    from headrace.messages.tensor import BytesTensor, Tensor, as_tensor, data_type, wire_bytes
    from headrace.messages.ticket import Batch, Padding, Respond, Ticket
    from headrace.models.configuring import backend_settings
    from headrace.models.control_mode import ControlMode, LoadingParts
    from headrace.models.served import ServedModel
    from headrace.off_loop import TooLargeForLoop
    from headrace.schedulers.base import (
        Clock,
        DelayedStart,
        Dependency,
        FullScheduler,
        InstanceInfo,
        Occupancy,
        OtherModel,
        Scheduler,
        SchedulerContext,
        Timer,
        Wait,
        Waiting,
    )
    from headrace.server import Server
    from headrace.storage.base import Storage
    from headrace.telemetry.executions import BatchTimes, FinishedInference, Observer, Recorder, TimeKeeper
    from headrace.telemetry.log_limits import rate_limited_logger
    from headrace.telemetry.logs import Log, LogSettings, draw_table
    from headrace.telemetry.published import Measured, PublishedMetric, Publisher
    from headrace.telemetry.series import MetricKind, MetricOperation, check_metric_update, metric_without_value
    from headrace_cli.command_line import WordError, parse_options
    from headrace_cli.inspection.inspector import Findings, InspectedModel, Inspector
    from headrace_cli.security.review import SecurityReview
    from headrace_cli.serve import Serve
    from headrace_cli.server_command import ServerCommand
    from headrace_cli.usage import FlagHelp
    from headrace_grpc import grpc_service_pb2
    from headrace_grpc.hosts import GrpcHost
    from headrace_grpc.plugin_methods import GrpcMethod, RpcWrapper
    from headrace_grpc.rpc import Rpc
    from headrace_harnesses import InstanceHarness, SchedulerHarness
    from headrace_hosts.file_changes import FileChanges
    from headrace_hosts.tls_files import TlsFiles
    from headrace_http.asgi import create_app
    from headrace_http.caller_limits import StallTimer
    from headrace_http.file_routes import FileRoute
    from headrace_http.forwarding import Forwarded, ForwardingPort
    from headrace_http.http_host import HttpHost, HttpPort
    from headrace_http.machine_metrics import machine_metrics
    from headrace_http.message import HttpReply, HttpRequest
    from headrace_http.open_connections import OpenConnections
    from headrace_http.plugin_routes import HttpCall, HttpRoute, HttpStream
    from headrace_http.strict_requests import StrictRequests
    from headrace_http.web_sockets import WebSocket, WebSocketRoute
    from headrace_loading import LoadableModel, LoadControl
    from headrace_locations.tensor_locations import TensorLocation
    from headrace_processes.handshake import InstanceSpec
    from headrace_processes.ipc.shared_mapping import FileTooSmall, SharedMapping
    from headrace_processes.supervision.child_process import child_command
    from headrace_processes.supervision.exits import ending
    from headrace_processes.supervision.orphan_reaper import ORPHAN_REAPER

#: The module of each name. Imported on first use: a backend need not import a server, and the process of an instance
#: has only NumPy.
_HOMES = {
    "headrace.agents.base": ("RepositoryAgent",),
    "headrace.backends.base": (
        "AnyInstance",
        "Backend",
        "Call",
        "DeferredInstance",
        "Device",
        "DeviceKind",
        "Instance",
        "Isolation",
        "Model",
        "RequestInstance",
        "StreamInstance",
        "Tensors",
    ),
    "headrace.backends.cores": ("available_cores",),
    "headrace.backends.services": ("LOG_LEVELS", "LogLevel", "LoopServices", "Services"),
    "headrace.backends.sharing": ("Shared",),
    "headrace.caches.base": ("CachedResponse", "ResponseCache"),
    "headrace.caches.packing": ("pack_response", "unpack_response"),
    "headrace.command": ("Command",),
    "headrace_cli.command_line": ("WordError", "parse_options"),
    "headrace_cli.security.review": ("SecurityReview",),
    "headrace_cli.serve": ("Serve",),
    "headrace_cli.server_command": ("ServerCommand",),
    "headrace_cli.usage": ("FlagHelp",),
    "headrace.config.path_checks": ("one_line", "why_path_leaves"),
    "headrace.config.completed_fields": ("CompletedField", "names_all_tensors"),
    "headrace.config.config_json": ("config_to_json",),
    "headrace.config.derive": ("padding_inputs",),
    "headrace.config.model_config_pb2": (
        "ModelConfig",
        "ModelEnsembling",
        "ModelInput",
        "ModelInstanceGroup",
        "ModelOutput",
        "ModelSequenceBatching",
    ),
    "headrace.config.option_groups": ("OptionGroup",),
    "headrace.config.options": ("ServerOptions",),
    "headrace.config.parameters": ("parse_parameters", "read_isolation", "read_load_timeout"),
    "headrace.config.parse": ("read_config",),
    "headrace.config.regular_files": ("in_memory", "open_regular", "read_regular"),
    "headrace.config.validation": ("Problem", "check_shape"),
    "headrace.distributions": ("distribution_of",),
    "headrace.engine": (
        "AnyOperation",
        "Caller",
        "Engine",
        "RequestSubmitter",
        "ExtensionOperation",
        "Interceptor",
        "Meter",
        "ModelView",
        "Operation",
        "Outcome",
        "Watch",
    ),
    "headrace.errors": (
        "AlreadyExists",
        "BackendError",
        "CallerError",
        "Cancelled",
        "Code",
        "ConfigError",
        "InternalError",
        "InvalidArgument",
        "LoadError",
        "NotFound",
        "HeadraceError",
        "PermissionDenied",
        "Rescheduled",
        "ResourceExhausted",
        "Unauthenticated",
        "Unavailable",
        "Unsupported",
    ),
    "headrace.frontends.base": ("Frontend",),
    "headrace.frontends.extension": ("Addition", "Extension"),
    "headrace.frontends.request_parameters": ("RequestParameters",),
    "headrace_locations.tensor_locations": ("TensorLocation",),
    "headrace_hosts.file_changes": ("FileChanges",),
    "headrace_hosts.tls_files": ("TlsFiles",),
    "headrace_harnesses": ("InstanceHarness", "SchedulerHarness"),
    "headrace.off_loop": ("TooLargeForLoop",),
    "headrace_grpc.hosts": ("GrpcHost",),
    "headrace_grpc.plugin_methods": ("GrpcMethod", "RpcWrapper"),
    "headrace_grpc.rpc": ("Rpc",),
    "headrace_http.asgi": ("create_app",),
    "headrace_http.caller_limits": ("StallTimer",),
    "headrace_http.file_routes": ("FileRoute",),
    "headrace_http.forwarding": ("Forwarded", "ForwardingPort"),
    "headrace_http.http_host": ("HttpHost", "HttpPort"),
    "headrace_http.machine_metrics": ("machine_metrics",),
    "headrace_http.message": ("HttpReply", "HttpRequest"),
    "headrace_http.open_connections": ("OpenConnections",),
    "headrace_http.plugin_routes": ("HttpCall", "HttpRoute", "HttpStream"),
    "headrace_http.strict_requests": ("StrictRequests",),
    "headrace_http.web_sockets": ("WebSocket", "WebSocketRoute"),
    "headrace.hookspecs": ("hookimpl",),
    "headrace_cli.inspection.inspector": ("Findings", "InspectedModel", "Inspector"),
    "headrace.memory_release": ("release_memory", "share_heap"),
    "headrace.messages.device_tensor": ("DeviceTensor", "StackedTensors", "on_host"),
    "headrace.messages.dtypes": ("DataType",),
    "headrace.messages.request": ("InferRequest", "Parameter"),
    "headrace.messages.response": ("Answer", "InferResponse"),
    "headrace.messages.spec": ("Spec",),
    "headrace.messages.tensor": ("BytesTensor", "Tensor", "as_tensor", "data_type", "wire_bytes"),
    "headrace.messages.ticket": ("Batch", "Padding", "Respond", "Ticket"),
    "headrace.models.configuring": ("backend_settings",),
    "headrace.models.control_mode": ("ControlMode", "LoadingParts"),
    "headrace_loading": ("LoadControl", "LoadableModel"),
    "headrace.models.served": ("ServedModel",),
    "headrace.schedulers.base": (
        "Clock",
        "Dependency",
        "FullScheduler",
        "DelayedStart",
        "InstanceInfo",
        "Occupancy",
        "OtherModel",
        "Scheduler",
        "SchedulerContext",
        "Timer",
        "Wait",
        "Waiting",
    ),
    "headrace.server": ("Server",),
    "headrace.storage.base": ("Storage",),
    "headrace_processes.ipc.shared_mapping": ("FileTooSmall", "SharedMapping"),
    "headrace_processes.supervision.child_process": ("child_command",),
    "headrace_processes.supervision.exits": ("ending",),
    "headrace_processes.supervision.orphan_reaper": ("ORPHAN_REAPER",),
    "headrace.telemetry.executions": ("BatchTimes", "FinishedInference", "Observer", "Recorder", "TimeKeeper"),
    "headrace.telemetry.logs": ("Log", "LogSettings", "draw_table"),
    "headrace.telemetry.log_limits": ("rate_limited_logger",),
    "headrace.telemetry.published": ("Measured", "PublishedMetric", "Publisher"),
    "headrace.telemetry.series": ("MetricKind", "MetricOperation", "check_metric_update", "metric_without_value"),
    "headrace.executors.executor": ("BatchSource", "Executor", "RunsOn"),
    "headrace.executors.kind": ("ExecutorKind", "ExecutorResources", "InstancePlan"),
    "headrace.executors.output_schema": ("OutputSchema",),
    "headrace.executors.threads": ("LoopWakeup",),
    "headrace.executors.warmup": ("WarmupSample",),
    "headrace_processes.handshake": ("InstanceSpec",),
}
#: The modules that are exported whole.
_MODULES = {"dtypes": "headrace.messages.dtypes", "grpc_service_pb2": "headrace_grpc.grpc_service_pb2"}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LOG_LEVELS",
    "ORPHAN_REAPER",
    "Addition",
    "AlreadyExists",
    "Answer",
    "AnyInstance",
    "AnyOperation",
    "Backend",
    "BackendError",
    "Batch",
    "BatchSource",
    "BatchTimes",
    "BytesTensor",
    "CachedResponse",
    "Call",
    "Caller",
    "CallerError",
    "Cancelled",
    "Clock",
    "Code",
    "Command",
    "CompletedField",
    "ConfigError",
    "ControlMode",
    "DataType",
    "DeferredInstance",
    "DelayedStart",
    "Dependency",
    "Device",
    "DeviceKind",
    "DeviceTensor",
    "Engine",
    "Executor",
    "ExecutorKind",
    "ExecutorResources",
    "Extension",
    "ExtensionOperation",
    "FileChanges",
    "FileRoute",
    "FileTooSmall",
    "Findings",
    "FinishedInference",
    "FlagHelp",
    "Forwarded",
    "ForwardingPort",
    "Frontend",
    "FullScheduler",
    "GrpcHost",
    "GrpcMethod",
    "HeadraceError",
    "HttpCall",
    "HttpHost",
    "HttpPort",
    "HttpReply",
    "HttpRequest",
    "HttpRoute",
    "HttpStream",
    "InferRequest",
    "InferResponse",
    "InspectedModel",
    "Inspector",
    "Instance",
    "InstanceHarness",
    "InstanceInfo",
    "InstancePlan",
    "InstanceSpec",
    "Interceptor",
    "InternalError",
    "InvalidArgument",
    "Isolation",
    "LoadControl",
    "LoadError",
    "LoadableModel",
    "LoadingParts",
    "Log",
    "LogLevel",
    "LogSettings",
    "LoopServices",
    "LoopWakeup",
    "Measured",
    "Meter",
    "MetricKind",
    "MetricOperation",
    "Model",
    "ModelConfig",
    "ModelEnsembling",
    "ModelInput",
    "ModelInstanceGroup",
    "ModelOutput",
    "ModelSequenceBatching",
    "ModelView",
    "NotFound",
    "Observer",
    "Occupancy",
    "OpenConnections",
    "Operation",
    "OptionGroup",
    "OtherModel",
    "Outcome",
    "OutputSchema",
    "Padding",
    "Parameter",
    "PermissionDenied",
    "Problem",
    "PublishedMetric",
    "Publisher",
    "Recorder",
    "RepositoryAgent",
    "RequestInstance",
    "RequestParameters",
    "RequestSubmitter",
    "Rescheduled",
    "ResourceExhausted",
    "Respond",
    "ResponseCache",
    "Rpc",
    "RpcWrapper",
    "RunsOn",
    "Scheduler",
    "SchedulerContext",
    "SchedulerHarness",
    "SecurityReview",
    "Serve",
    "ServedModel",
    "Server",
    "ServerCommand",
    "ServerOptions",
    "Services",
    "Shared",
    "SharedMapping",
    "Spec",
    "StackedTensors",
    "StallTimer",
    "Storage",
    "StreamInstance",
    "StrictRequests",
    "Tensor",
    "TensorLocation",
    "Tensors",
    "Ticket",
    "TimeKeeper",
    "Timer",
    "TlsFiles",
    "TooLargeForLoop",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Wait",
    "Waiting",
    "WarmupSample",
    "Watch",
    "WebSocket",
    "WebSocketRoute",
    "WordError",
    "as_tensor",
    "available_cores",
    "backend_settings",
    "check_metric_update",
    "check_shape",
    "child_command",
    "config_to_json",
    "create_app",
    "data_type",
    "distribution_of",
    "draw_table",
    "dtypes",
    "ending",
    "grpc_service_pb2",
    "hookimpl",
    "in_memory",
    "machine_metrics",
    "metric_without_value",
    "names_all_tensors",
    "on_host",
    "one_line",
    "open_regular",
    "pack_response",
    "padding_inputs",
    "parse_options",
    "parse_parameters",
    "rate_limited_logger",
    "read_config",
    "read_isolation",
    "read_load_timeout",
    "read_regular",
    "release_memory",
    "share_heap",
    "unpack_response",
    "why_path_leaves",
    "wire_bytes",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'headrace' has no attribute '{name}'")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
