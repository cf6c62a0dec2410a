"""The operators of TensorFlow that a graph may use without trust in its model.

A graph is a program: TensorFlow has operators that read and write any file, run Python of the process, connect to other
machines, or take memory addresses. A model file from elsewhere must not do that, so only operators that compute are
allowed. Operators without state are allowed, except those in `REFUSED`. Operators with state are allowed if they are in
`STATEFUL` or begin with one of `STATEFUL_PREFIXES`. So new operators of TensorFlow are refused until they were
reviewed.
"""

from __future__ import annotations

from collections.abc import Mapping

_READS, _WRITES = "it reads files", "it writes files"
_PYTHON = "it runs Python of the process"
_DATA = "it is an input pipeline, which reads and writes files"
_MACHINE = "it may be given addresses in memory, or compiled code"
_STRINGS = "it runs the content of a tensor, which was not checked"
_ANOTHER = "it is of another machine"
_UNWRITTEN = "it returns memory that it has not written, in which tensors of other callers may still be"
_CALLS_OTHERS = "it speaks to other devices and machines"

#: Stateless operators that do more than compute, and why each is refused. Stateful ones have their reason here, too.
REFUSED: Mapping[str, str] = {
    "PyFunc": _PYTHON,
    "PyFuncStateless": _PYTHON,
    "EagerPyFunc": _PYTHON,
    "Abort": "it ends the process",
    "ImmutableConst": _READS,
    "Skipgram": _READS,
    "ReadFile": _READS,
    "MatchingFiles": _READS,
    "InitializeTableFromTextFile": _READS,
    "InitializeTableFromTextFileV2": _READS,
    "FixedUnigramCandidateSampler": _READS,
    "GenerateVocabRemapping": _READS,
    "LoadAndRemapMatrix": _READS,
    "RestoreV2": _READS,
    "Restore": _READS,
    "RestoreSlice": _READS,
    "RecordInput": _READS,
    "WholeFileReader": _READS,
    "WholeFileReaderV2": _READS,
    "TextLineReader": _READS,
    "TextLineReaderV2": _READS,
    "TFRecordReader": _READS,
    "TFRecordReaderV2": _READS,
    "FixedLengthRecordReader": _READS,
    "FixedLengthRecordReaderV2": _READS,
    "LMDBReader": _READS,
    "ReaderRead": _READS,
    "ReaderReadV2": _READS,
    "ReaderReadUpTo": _READS,
    "ReaderReadUpToV2": _READS,
    "DecodeProtoV2": "it reads the files of descriptors that its attributes name",
    "EncodeProto": "it reads the files of descriptors that its attributes name",
    "WriteFile": _WRITES,
    "Save": _WRITES,
    "SaveSlices": _WRITES,
    "SaveV2": _WRITES,
    "MergeV2Checkpoints": _WRITES,
    "DumpTensor": _WRITES,
    "CreateSummaryFileWriter": _WRITES,
    "CreateSummaryDbWriter": _WRITES,
    "DebugIdentity": "it writes to the addresses that its attributes name",
    "DebugIdentityV2": "it writes to the addresses that its attributes name",
    "DebugIdentityV3": "it writes to the addresses that its attributes name",
    "DebugNanCount": "it writes to the addresses that its attributes name",
    "DebugNumericSummary": "it writes to the addresses that its attributes name",
    "DebugNumericSummaryV2": "it writes to the addresses that its attributes name",
    "PrintV2": "it writes to the file that its attribute output_stream names",
    "FileSystemSetConfiguration": "it configures the file systems of the process",
    "IteratorFromStringHandle": _STRINGS,
    "IteratorFromStringHandleV2": _STRINGS,
    "RemoteCall": _CALLS_OTHERS,
    "RpcCall": _CALLS_OTHERS,
    "RpcClient": _CALLS_OTHERS,
    "RpcServer": _CALLS_OTHERS,
    "Send": _CALLS_OTHERS,
    "Recv": _CALLS_OTHERS,
    "_Send": _CALLS_OTHERS,
    "_Recv": _CALLS_OTHERS,
    "_HostSend": _CALLS_OTHERS,
    "_HostRecv": _CALLS_OTHERS,
    "XlaCustomCall": _MACHINE,
    "XlaCustomCallV2": _MACHINE,
    "XlaCallModule": _MACHINE,
    "MlirPassthroughOp": _MACHINE,
    "TPUExecute": _MACHINE,
    "Cholesky": f"{_UNWRITTEN}, where a matrix is not positive definite",
    "FakeParam": _UNWRITTEN,
    "ParallelConcat": f"{_UNWRITTEN}, where its shape has more rows than it has inputs",
    "TemporaryVariable": _UNWRITTEN,
    "_ParallelConcatStart": _UNWRITTEN,
    "SnapshotDatasetReader": _READS,
    "SnapshotNestedDatasetReader": _READS,
}
#: Operators that do not write all of an output unless this attribute is true, and the attribute's default.
WRITES_ALL: Mapping[str, tuple[str, bool]] = {
    "Empty": ("init", False),
    "Eig": ("compute_v", True),
    "SelfAdjointEigV2": ("compute_v", True),
    "Svd": ("compute_uv", True),
}
#: Words in the names of operators that are refused with them.
REFUSED_WORDS: Mapping[str, str] = {
    "Dataset": _DATA,
    "Iterator": _DATA,
    "Rpc": _CALLS_OTHERS,
    "Collective": _CALLS_OTHERS,
    "Nccl": _CALLS_OTHERS,
    "DTensor": _CALLS_OTHERS,
    "TPU": _ANOTHER,
    "Tpu": _ANOTHER,
    "Infeed": _ANOTHER,
    "Outfeed": _ANOTHER,
    "Summary": _WRITES,
}
#: Allowed operators, although their names contain a refused word.
HARMLESS = frozenset(
    (
        "HistogramSummary", "ScalarSummary", "ImageSummary", "AudioSummary", "AudioSummaryV2", "MergeSummary",
        "TensorSummary", "TensorSummaryV2", "BoostedTreesMakeStatsSummary", "BoostedTreesAggregateStats",
    )
)  # fmt: skip

#: Stateful operators that only keep numbers or draw them.
STATEFUL = frozenset(
    (
        # variables
        "VarHandleOp", "_VarHandlesOp", "ReadVariableOp", "_ReadVariablesOp", "AssignVariableOp", "AssignAddVariableOp",
        "AssignSubVariableOp", "VarIsInitializedOp", "VariableShape", "Variable", "VariableV2",
        "DestroyResourceOp", "DisableCopyOnRead", "ReadVariableXlaSplitND", "AssignVariableXlaConcatND",
        # tables
        "HashTable", "HashTableV2", "MutableHashTable", "MutableHashTableV2", "MutableHashTableOfTensors",
        "MutableHashTableOfTensorsV2", "MutableDenseHashTable", "MutableDenseHashTableV2", "AnonymousHashTable",
        "AnonymousMutableHashTable", "AnonymousMutableHashTableOfTensors", "AnonymousMutableDenseHashTable",
        "InitializeTableV2", "AddSparseToTensorsMap", "AddManySparseToTensorsMap", "TakeManySparseFromTensorsMap",
        # random numbers
        "RandomCrop", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle", "RandomStandardNormal",
        "RandomUniform", "RandomUniformInt", "TruncatedNormal", "ParameterizedTruncatedNormal", "Multinomial",
        "NonDeterministicInts", "RngSkip", "RngReadAndSkip", "StatelessRandomGetAlg", "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2", "AllCandidateSampler", "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler", "ThreadUnsafeUnigramCandidateSampler", "UniformCandidateSampler",
        "StatefulRandomBinomial", "StatefulStandardNormal", "StatefulStandardNormalV2", "StatefulTruncatedNormal",
        "StatefulUniform", "StatefulUniformFullInt", "StatefulUniformInt",
        # control flow; the functions that these call are checked, too
        "Case", "If", "_If", "While", "_While", "StatefulPartitionedCall", "Assert", "CheckNumerics", "CheckNumericsV2",
        "Print", "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "MutexV2", "MutexLock", "ConsumeMutexLock",
        # others that compute
        "GuaranteeConst", "DeepCopy", "IsTensorFloat32Enabled", "DeviceIndex", "Timestamp", "CudnnRNN",
        "CudnnRNNV2", "CudnnRNNV3", "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", "Stack", "StackV2",
        "StackPushV2", "StackPopV2", "StackCloseV2", "DummySeedGenerator", "AnonymousSeedGenerator",
        "AnonymousRandomSeedGenerator", "BoostedTreesPredict", "BoostedTreesExampleDebugOutputs",
        "BoostedTreesEnsembleResourceHandleOp", "BoostedTreesDeserializeEnsemble", "BoostedTreesCreateEnsemble",
        "IsBoostedTreesEnsembleInitialized", "BoostedTreesGetEnsembleStates", "BoostedTreesSerializeEnsemble",
    )
)  # fmt: skip
#: Prefixes of further such operators: variables and tables by their handle, and arrays of tensors.
STATEFUL_PREFIXES = ("Resource", "LookupTable", "TensorArray")
#: Operators that read a file, and the input that names it. They are allowed for the model's own files.
FILE_INPUTS: Mapping[str, int] = {
    "RestoreV2": 0,
    "InitializeTableFromTextFile": 1,
    "InitializeTableFromTextFileV2": 1,
}
#: Where ``PrintV2`` may write.
_STREAMS = (b"", b"stdout", b"stderr", b"log(info)", b"log(warning)", b"log(error)")


def why_refused(node: object, is_stateful: bool) -> str:
    """Return why an operator may not run without trust; empty if it may.

    ``node`` is a ``NodeDef``; ``is_stateful`` is TensorFlow's attribute of the operator.
    """
    name: str = node.op  # type: ignore[attr-defined]
    if name == "PrintV2":
        return "" if node.attr["output_stream"].s in _STREAMS else REFUSED[name]  # type: ignore[attr-defined]
    if name in HARMLESS:
        return ""
    if name in WRITES_ALL:
        attribute, default = WRITES_ALL[name]
        attributes = node.attr  # type: ignore[attr-defined]
        is_true = attributes[attribute].b if attribute in attributes else default
        return "" if is_true else f"{_UNWRITTEN}, unless its attribute '{attribute}' is true"
    if name in REFUSED:
        return REFUSED[name]
    for word, reason in REFUSED_WORDS.items():
        if word in name:
            return reason
    if not is_stateful or name in STATEFUL or name.startswith(STATEFUL_PREFIXES):
        return ""
    return "it has state, and is not known to do no harm"
