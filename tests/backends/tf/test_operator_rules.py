"""The list of operators, compared with the operators of the installed TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from headrace_tf.operator_rules import (
    FILE_INPUTS,
    HARMLESS,
    REFUSED,
    STATEFUL,
    STATEFUL_PREFIXES,
    WRITES_ALL,
    why_refused,
)
from headrace_tf.tensorflow_process import own_operators

pytest.importorskip("tensorflow")

#: Words in the name of an operator that touches files, the network, Python, other processes or devices, or memory by
#: its address. Each operator with one is refused, but for `COMPUTES`.
SUSPECT = re.compile(
    "File|Read|Writ|Save|Restore|Load|Dump|Debug|Checkpoint|Asset|Directory|Path|Socket|Url|Http|Sql|LMDB|Bigtable|Gcs"
    "|Dataset|Iterator|Snapshot|Record|Summary|Print|Proto|Py|Lua|Shell|Exec|Process|Fork|Signal|Environ|Getenv"
    "|Rpc|Remote|Send|Recv|Collective|Nccl|Host|Server|Service|Worker|Distribut|Infeed|Outfeed|Barrier|TPU|Tpu"
    "|Abort|Immutable|Custom|Module|Pointer|Address|Memory|Session|Queue|Stage|Ifrt|Mlir|Dtensor|DTensor"
)
#: What has such a word and only computes, by the word that it has.
COMPUTES: Mapping[str, frozenset[str]] = {
    word: frozenset(names.split())
    for word, names in {
        # variables, arrays of tensors, tables, and references to readers and queues, which are refused themselves
        "Read": "ReadVariableOp _ReadVariablesOp ReadVariableXlaSplitND DisableCopyOnRead RngReadAndSkip "
        "TensorArrayRead TensorArrayReadV2 TensorArrayReadV3 ReaderNumRecordsProduced ReaderNumWorkUnitsCompleted "
        "ReaderReset ReaderRestoreState ReaderSerializeState ThreadUnsafeUnigramCandidateSampler",
        "Writ": "TensorArrayWrite TensorArrayWriteV2 TensorArrayWriteV3",
        "Queue": "QueueClose QueueDequeue QueueDequeueMany QueueDequeueUpTo QueueEnqueue QueueEnqueueMany "
        "QueueIsClosed QueueSize",
        "Barrier": "BarrierClose BarrierIncompleteSize BarrierInsertMany BarrierReadySize BarrierTakeMany "
        "XlaOptimizationBarrier",
        # strings that look like names of files, and summaries as tensors
        "File": "ShardedFilename ShardedFilespec",
        "Summary": " ".join(HARMLESS),
        # to the log
        "Print": "Print PrintV2",
        # of the host as a device: the same process
        "Host": "_HostCast CopyHost HostConst",
        # words with another meaning here
        "Snapshot": "Snapshot",
        "Debug": "DebugGradientIdentity DebugGradientRefIdentity BoostedTreesExampleDebugOutputs",
        "Custom": "CustomAggregator XlaSparseDenseMatmulCustomCombinerOnTcGradWithAdagradAndCsrInput "
        "XlaSparseDenseMatmulCustomCombinerOnTcGradWithAdagradMomentumAndCsrInput "
        "XlaSparseDenseMatmulCustomCombinerOnTcGradWithAdamAndCsrInput "
        "XlaSparseDenseMatmulCustomCombinerOnTcGradWithCsrInput "
        "XlaSparseDenseMatmulCustomCombinerOnTcGradWithFtrlAndCsrInput "
        "XlaSparseDenseMatmulCustomCombinerOnTcGradWithSgdAndCsrInput "
        "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput",
    }.items()
}


def reason(name: str, is_stateful: bool) -> str:
    return why_refused(SimpleNamespace(op=name, attr={"output_stream": SimpleNamespace(s=b"stderr")}), is_stateful)


def test_every_operator_that_does_more_than_compute_is_refused() -> None:
    own = own_operators()
    suspects = {name for name in own if SUSPECT.search(name)}
    assert len(suspects) > 400
    let_through = {name for name in suspects if not reason(name, own[name])}
    assert let_through - frozenset().union(*COMPUTES.values()) == set()


def test_every_operator_with_a_file_name_is_refused() -> None:
    """By the names of its attributes and inputs."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    takes_location = re.compile("file|region|prefix|path|directory|address|url|socket|host_name|hostname")
    listed = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(pywrap_tf_session.TF_GetAllOpList()))
    named = {
        each.name: each.is_stateful
        for each in listed.op
        if any(
            takes_location.search(field.name) and field.name != "top_paths" for field in (*each.attr, *each.input_arg)
        )
    }
    assert {"ReadFile", "Skipgram", "ImmutableConst", "SaveV2", "FixedUnigramCandidateSampler"} <= named.keys()
    assert {name for name, is_stateful in named.items() if not reason(name, is_stateful)} == set()


def test_every_operator_listed_as_safe_exists_and_is_allowed() -> None:
    """So that the exceptions of the test above stay few."""
    own = own_operators()
    for word, names in COMPUTES.items():
        for name in names:
            assert name in own, f"TensorFlow has no {name}"
            assert word in name or word.lower() in name or name in HARMLESS, f"{name} is no {word}"
            assert not reason(name, own[name]), name


def test_every_operator_of_a_rule_exists() -> None:
    """Operators of versions that are not installed would be listed here."""
    named = {*REFUSED, *WRITES_ALL, *HARMLESS, *STATEFUL, *FILE_INPUTS}
    assert named - own_operators().keys() == set()
    for prefix in STATEFUL_PREFIXES:
        assert any(name.startswith(prefix) for name in own_operators()), prefix


def test_a_stateful_operator_without_a_rule_is_refused() -> None:
    assert "not known to do no harm" in reason("BrandNewOperator", True)
    assert reason("BrandNewOperator", False) == ""


@pytest.mark.parametrize(
    ("stream", "is_refused"),
    [("", False), ("stdout", False), ("stderr", False), ("log(info)", False), ("file:///tmp/x", True), ("x", True)],
)
def test_an_operator_prints_to_the_log_and_to_no_file(stream: str, is_refused: bool) -> None:
    node = SimpleNamespace(op="PrintV2", attr={"output_stream": SimpleNamespace(s=stream.encode())})
    assert bool(why_refused(node, True)) == is_refused
