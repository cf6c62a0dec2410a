"""Programs of torch.export, with PyTorch's own ``ExportedProgram.module()`` as the oracle."""

from __future__ import annotations

import gc
import json
import linecache
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop
from torch.export import Dim

from headrace import ConfigError, InvalidArgument, LoadError, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_torch.exported_program import open_program
from headrace_torch.parameters import Parameters
from headrace_torch.pt2_archive import Pt2Archive

pytestmark = [  # of PyTorch's export, to itself
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The tensor attributes .* were assigned during export:UserWarning"),
]

ROWS = Dim("rows", min=1, max=16)


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(inplace=True),
            torch.nn.MaxPool2d(2),
            torch.nn.Dropout(0.5),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.layers(x), -1)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.queries, self.norm = torch.nn.Linear(16, 48), torch.nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        x = self.embedding(tokens) + places[None, :, None]
        heads = self.queries(x).reshape(*x.shape[:2], 2, 24).transpose(1, 2)
        q, k, v = torch.chunk(heads, 3, -1)
        seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: torch.Tensor = self.norm(x + seen.transpose(1, 2).reshape(x.shape))
        return y


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.LSTM(4, 6, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, (hidden, _) = self.cell(x)
        return out, hidden.transpose(0, 1)


class Indexing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(12.0).reshape(4, 3), persistent=False)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        best, _ = torch.topk(x, 2)
        parts = torch.split(self.table[index], 1, dim=-1)
        x = x.clone()
        x[:, 0] = float("-inf")
        return torch.cat([best, *parts, torch.nan_to_num(x, neginf=-1.0)], -1)


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def up(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        def down(x: torch.Tensor) -> torch.Tensor:
            return x - 1

        y: torch.Tensor = torch.cond(x.sum() > 0, up, down, (x,))
        return y


class Until(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loop: Callable[..., tuple[torch.Tensor, ...]] = while_loop
        return loop(lambda y: y.sum() < 1, lambda y: (y * 2,), (x,))[0]


class WithoutGradients(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 3
        with torch.autocast("cpu", torch.bfloat16):
            y = y @ y.T
        return y.float() + x.shape[0]


class SumAndScale(torch.nn.Module):
    def forward(
        self, pair: tuple[torch.Tensor, torch.Tensor], *, scale: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {"sum": pair[0] + pair[1], "scaled": pair[0] * scale["by"]}


class Sum(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


class InPlaceSum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).add_(1).view(x.shape)


def images(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 3, 8, 8),)


def tokens(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randint(0, 50, (rows, 7)),)


def series(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 5, 4),)


def indexed(rows: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(rows, 5), torch.randint(0, 4, (rows,))


def square(rows: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(rows, 3),)


NETWORKS = [
    (Convolutions, images),
    (Attention, tokens),
    (Recurrent, series),
    (Indexing, indexed),
    (Branches, square),
    (WithoutGradients, square),
]


@pytest.mark.parametrize(("network", "make"), NETWORKS, ids=[each.__name__ for each, _ in NETWORKS])
@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed"])
def test_results_equal_pytorchs(programs: Any, network: type[torch.nn.Module], make: Any, decomposed: bool) -> None:
    torch.manual_seed(3)
    arguments = make(5)
    program = torch.export.export(network().eval(), arguments, dynamic_shapes=[{0: ROWS} for _ in arguments])
    path = programs.root / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    torch.export.save(program.run_decompositions() if decomposed else program, str(path))
    instance = programs.load()
    module = program.module()
    names = [io.name for io in programs.config.input]
    for rows in (2, 9):
        values = make(rows)
        with torch.no_grad():
            expected = module(*values)
        found = instance.execute({name: value.numpy() for name, value in zip(names, values, strict=True)})
        results = expected if isinstance(expected, tuple) else (expected,)
        for index, value in enumerate(results):
            np.testing.assert_allclose(found[f"OUTPUT__{index}"], value, rtol=1e-5, atol=1e-6)


def test_the_config_is_completed_from_the_program(programs: Any) -> None:
    programs.save(Sum(), torch.randn(4, 3), torch.randn(4, 3), dynamic_shapes=({0: ROWS}, {0: ROWS}))
    programs.load()
    config: ModelConfig = programs.config
    assert [(io.name, io.data_type, list(io.dims)) for io in config.input] == [("a", 11, [3]), ("b", 11, [3])]
    assert [(io.name, list(io.dims)) for io in config.output] == [("OUTPUT__0", [3]), ("OUTPUT__1", [3])]
    assert config.max_batch_size == 4
    assert config.HasField("dynamic_batching")


def test_a_program_with_fixed_shapes_does_not_batch(programs: Any) -> None:
    programs.save(Sum(), torch.randn(4, 3), torch.randn(4, 3))
    programs.load()
    assert programs.config.max_batch_size == 0
    assert [list(io.dims) for io in programs.config.input] == [[4, 3], [4, 3]]
    with pytest.raises(ConfigError, match="model does not support batching while non-zero max_batch_size"):
        programs.load("max_batch_size: 4")


def test_batches_are_no_larger_than_the_program_allows(programs: Any) -> None:
    few = Dim("few", min=1, max=3)
    programs.save(Sum(), torch.randn(2, 3), torch.randn(2, 3), dynamic_shapes=({0: few}, {0: few}))
    programs.load()
    assert programs.config.max_batch_size == 3
    with pytest.raises(ConfigError, match="specified max-batch 8 but the program only supports max-batch 3"):
        programs.load("max_batch_size: 8")


A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("first", "second"),
    [("a", "b"), ("INPUT__0", "INPUT__1"), ("left__0", "right__1"), ("ARGS[0]", "ARGS[1]"), ("x", "y")],
)
def test_inputs_have_the_names_of_each_convention(programs: Any, first: str, second: str) -> None:
    programs.save(Sum(), torch.randn(4, 3), torch.randn(4, 3), dynamic_shapes=({0: ROWS}, {0: ROWS}))
    x = 'input { name: "%s" data_type: TYPE_FP32 dims: 3 }'
    y = 'output { name: "%s" data_type: TYPE_FP32 dims: 3 }'
    ordered = [(first, second)] if first == "x" else [(first, second), (second, first)]
    for one, other in ordered:
        for results in (("RESULT[1]", "RESULT[0]"), ("d__1", "s__0"), ("OUTPUT__1", "OUTPUT__0")):
            config = "max_batch_size: 8 " + x % one + x % other + "".join(y % name for name in results)
            found = programs.load(config).execute({first: A, second: B})
            np.testing.assert_array_equal(found[results[0]], A - B)
            np.testing.assert_array_equal(found[results[1]], A + B)


def test_nested_arguments_have_their_places_and_results_their_keys(programs: Any) -> None:
    a, b, by = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3)
    programs.save(SumAndScale(), (a, b), named={"scale": {"by": by}})
    found = programs.load().execute({"pair_0": a.numpy(), "pair_1": b.numpy(), "scale_by": by.numpy()})
    np.testing.assert_array_equal(found["sum"], a + b)
    places = ("ARGS[0][1]", "ARGS[0][0]", "KWARGS[scale][by]")
    shapes = dict(zip(places, ("dims: [2, 3]", "dims: [2, 3]", "dims: 3"), strict=True))
    config = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 {dims} }}' for name, dims in shapes.items())
    config += 'output { name: "RESULT[scaled]" data_type: TYPE_FP32 dims: [2, 3] }'
    found = programs.load(config).execute(dict(zip(places, (b.numpy(), a.numpy(), by.numpy()), strict=True)))
    np.testing.assert_array_equal(found["RESULT[scaled]"], a * by)
    with pytest.raises(ConfigError, match=r"'ARGS\[1\]' .* which has ARGS\[0\]\[0\], ARGS\[0\]\[1\], KWARGS\[scale\]"):
        programs.load(config.replace("ARGS[0][1]", "ARGS[1]"))


def test_a_config_that_the_program_contradicts_is_refused_in_tritons_words(programs: Any) -> None:
    programs.save(Sum(), torch.randn(4, 3), torch.randn(4, 3), dynamic_shapes=({0: ROWS}, {0: ROWS}))
    programs.load()
    good = str(programs.config)
    with pytest.raises(ConfigError, match="expects datatype TYPE_FP16 for input 'a', model provides TYPE_FP32"):
        programs.load(good.replace("TYPE_FP32", "TYPE_FP16", 1))
    with pytest.raises(ConfigError, match=r"'a': the model expects 2 dimensions \(shape \[-1,3\]\)"):
        programs.load(good.replace("dims: 3", "dims: 5", 1))
    with pytest.raises(ConfigError, match="configuration expects 1 inputs, model provides 2"):
        programs.load(
            'max_batch_size: 2 input { name: "a" data_type: TYPE_FP32 dims: 3 } '
            'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 3 }'
        )
    with pytest.raises(ConfigError, match="configuration expects 3 outputs, model provides 2: OUTPUT__0, OUTPUT__1"):
        programs.load(good + 'output { name: "OUTPUT__2" data_type: TYPE_FP32 dims: 3 }')


def test_sizes_outside_of_the_export_are_invalid_arguments(programs: Any) -> None:
    length = Dim("length", min=4, max=8)
    programs.save(
        Sum(), torch.randn(2, 6), torch.randn(2, 6), dynamic_shapes=({0: ROWS, 1: length}, {0: ROWS, 1: length})
    )
    instance = programs.load()
    for size in (4, 8):
        one = np.ones((2, size), np.float32)
        np.testing.assert_array_equal(instance.execute({"a": one, "b": one})["OUTPUT__0"], one + one)
    for size in (3, 9):
        with pytest.raises(
            InvalidArgument, match=f"'a': axis 1 is {size} long, but the program was exported for 4 to 8"
        ):
            instance.execute({"a": np.ones((2, size), np.float32), "b": np.ones((2, size), np.float32)})
    with pytest.raises(InvalidArgument, match=r"'b': axis 1 is 5 long, but with the other sizes .* takes 4"):
        instance.execute({"a": np.ones((2, 4), np.float32), "b": np.ones((2, 5), np.float32)})


def test_guards_of_the_export_hold_for_requests(programs: Any) -> None:
    class EvenOnly(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[1] % 2 == 0 else x

    programs.save(EvenOnly(), torch.ones(2, 6), dynamic_shapes=({1: Dim.AUTO},))
    instance = programs.load()
    assert instance.execute({"x": np.ones((2, 4), np.float32)})["OUTPUT__0"].shape == (2, 4)
    with pytest.raises(InvalidArgument, match=r"exported for inputs with .*L\['x'\].size\(\)\[1\] % 2"):
        instance.execute({"x": np.ones((2, 5), np.float32)})


def test_a_derived_size_holds(programs: Any) -> None:
    class Halves(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.reshape(b.shape[0], -1).sum(1) + b

    size = Dim("size", min=1, max=64)
    programs.save(Halves(), torch.ones(6), torch.ones(3), dynamic_shapes=({0: 2 * size}, {0: size}))
    instance = programs.load("max_batch_size: 0")
    inputs = {"a": np.ones(8, np.float32), "b": np.ones(4, np.float32)}
    np.testing.assert_array_equal(instance.execute(inputs)["OUTPUT__0"], [3, 3, 3, 3])
    with pytest.raises(InvalidArgument, match=r"'a': axis 0 is 8 long, but with the other sizes .* takes 10"):
        instance.execute(inputs | {"b": np.ones(5, np.float32)})


def test_a_scalar_is_one_element_in_inputs_and_outputs(programs: Any) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, by: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (x * by).sum(), torch.stack([by, by])

    programs.save(Scaled(), torch.ones(3), torch.tensor(2.0))
    instance = programs.load()
    assert [list(io.dims) for io in programs.config.input] == [[3], [1]]
    found = instance.execute({"x": np.ones(3, np.float32), "by": np.array([4], np.float32)})
    np.testing.assert_array_equal(found["OUTPUT__0"], [12])
    np.testing.assert_array_equal(found["OUTPUT__1"], [4, 4])


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_buffer_keeps_its_new_value(programs: Any, decomposed: bool) -> None:
    program = torch.export.export(Counter(), (torch.zeros(2),))
    path = programs.root / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    torch.export.save(program.run_decompositions() if decomposed else program, str(path))
    first, second = programs.load(), programs.load()
    zeros = {"x": np.zeros(2, np.float32)}
    assert [float(first.execute(zeros)["OUTPUT__0"][0]) for _ in range(3)] == [1, 2, 3]
    assert float(second.execute(zeros)["OUTPUT__0"][0]) == 1, "another instance has buffers of its own"


def test_a_program_does_not_write_to_read_only_inputs(programs: Any) -> None:
    programs.save(InPlaceSum(), torch.ones(3))
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    np.testing.assert_array_equal(programs.load().execute({"x": array})["OUTPUT__0"], [1, 1, 1])
    np.testing.assert_array_equal(array, [0, 0, 0])


def test_mixed_precision_reaches_a_program(programs: Any) -> None:
    module = torch.nn.Linear(64, 64).eval()
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    programs.save(module, torch.from_numpy(x))
    y = programs.load(autocast="bfloat16").execute({"input": x})["OUTPUT__0"]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = module(torch.from_numpy(x)).float()
    assert y.dtype.name == "bfloat16"
    np.testing.assert_allclose(np.asarray(y).astype(np.float32), expected)


def test_a_trusted_program_is_loaded_by_pytorch_and_answers_alike(programs: Any) -> None:
    a, b, by = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3)
    programs.save(SumAndScale(), (a, b), named={"scale": {"by": by}})
    inputs = {"pair_0": a.numpy(), "pair_1": b.numpy(), "scale_by": by.numpy()}
    found = programs.load(trust=True).execute(inputs)
    np.testing.assert_array_equal(found["sum"], a + b)
    np.testing.assert_array_equal(found["scaled"], a * by)


@pytest.mark.parametrize("trust", [False, True])
def test_closing_a_program_removes_its_source(trust: bool, programs: Any) -> None:
    a, b, by = torch.randn(2, 3), torch.randn(2, 3), torch.randn(3)
    path = programs.save(SumAndScale(), (a, b), named={"scale": {"by": by}})
    model = Model("m", 1, path.parent, ModelConfig(name="m"), Parameters(trust=trust))
    before = {*linecache.cache}
    with Pt2Archive("m", path) as archive:
        program = open_program(torch, model, archive, "cpu")
    generated = len({*linecache.cache} - before)
    program.close()
    remaining = len({*linecache.cache} - before)
    assert remaining == generated - 1
    assert trust or remaining == 0  # the others are from torch.export.load itself


@pytest.mark.parametrize("trust", [False, True])
def test_closing_a_program_frees_its_weights(trust: bool, programs: Any) -> None:
    """Also if the server has frozen the objects of the load (`gc.freeze`), which the collector then ignores."""
    module = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.BatchNorm1d(13)).eval()
    path = programs.save(module, torch.zeros(2, 7))
    model = Model("m", 1, path.parent, ModelConfig(name="m"), Parameters(trust=trust))
    gc.collect()
    before = set(map(id, _tensors()))
    with Pt2Archive("m", path) as archive:
        program = open_program(torch, model, archive, "cpu")
    gc.collect()
    weights = [weakref.ref(each) for each in _tensors() if id(each) not in before and 13 in each.shape]
    assert len(weights) >= 5
    gc.freeze()
    try:
        program.close()
        del program
        assert [each.shape for ref in weights if (each := ref()) is not None] == []
    finally:
        gc.unfreeze()


def _tensors() -> list[torch.Tensor]:
    return [each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)]


def test_constant_arguments_are_not_inputs(programs: Any) -> None:
    class Powers(torch.nn.Module):
        def forward(self, x: torch.Tensor, bias: torch.Tensor | None, power: int, y: torch.Tensor) -> torch.Tensor:
            return x**power + y if bias is None else bias

    programs.save(Powers(), torch.ones(2), None, 3, torch.ones(2))
    found = programs.load().execute({"x": np.array([1, 2], np.float32), "y": np.array([5, 6], np.float32)})
    np.testing.assert_array_equal(found["OUTPUT__0"], [6, 14])
    config = "".join(f'input {{ name: "{name}" data_type: TYPE_FP32 dims: 2 }} ' for name in ("ARGS[3]", "ARGS[0]"))
    config += 'output { name: "RESULT" data_type: TYPE_FP32 dims: 2 }'
    found = programs.load(config).execute({"ARGS[0]": np.array([1, 2], np.float32), "ARGS[3]": np.zeros(2, np.float32)})
    np.testing.assert_array_equal(found["RESULT"], [1, 8])
    with pytest.raises(LoadError, match="constants among its arguments, which PyTorch wants again"):
        programs.load(trust=True)


def test_the_error_names_a_type_that_the_protocol_lacks(programs: Any) -> None:
    programs.save(torch.nn.Identity(), torch.ones(2, dtype=torch.complex64))
    with pytest.raises(LoadError, match="unsupported datatype complex64 for input 'input' for model 'm'"):
        programs.load()


def test_inputs_may_precede_the_weights(programs: Any, rewrite: Any) -> None:
    path = programs.save(torch.nn.Linear(3, 2), torch.ones(1, 3))
    inputs = {"input": np.arange(3, dtype=np.float32).reshape(1, 3)}
    expected = programs.load().execute(inputs)["OUTPUT__0"]

    def turned(data: bytes) -> bytes:
        document = json.loads(data)
        module = document["graph_module"]
        for values in (module["graph"]["inputs"], module["signature"]["input_specs"]):
            values.insert(0, values.pop())
        return json.dumps(document).encode()

    rewrite(path, {"model.json": turned})
    np.testing.assert_array_equal(programs.load().execute(inputs)["OUTPUT__0"], expected)


def test_a_program_for_a_gpu_runs_on_the_cpu(programs: Any, rewrite: Any) -> None:
    path: Path = programs.save(Attention(), torch.randint(0, 50, (2, 7)))
    inputs = {"tokens": np.ones((2, 7), np.int64)}
    expected = programs.load().execute(inputs)["OUTPUT__0"]

    def on(*places: str) -> Callable[[bytes], bytes]:
        found = iter(range(10**6))
        return lambda data: re.sub(
            rb'"type": "[a-z]+", "index": (null|[0-9]+)',
            lambda _: b'"type": "cuda", "index": %b' % places[next(found) % len(places)].encode(),
            data,
        )

    rewrite(path, {"model.json": on("0")})
    np.testing.assert_array_equal(programs.load().execute(inputs)["OUTPUT__0"], expected)
    rewrite(path, {"model.json": on("0", "1")})
    with pytest.raises(LoadError, match="exported on several devices, cuda:0, cuda:1, and an instance runs on one"):
        programs.load()


def test_a_model_that_may_never_end_does_not_run_on_the_event_loop(programs: Any) -> None:
    x = torch.full((2,), 0.25)
    for module, anywhere, expected in ((Until(), False, 0.5), (InPlaceSum(), True, 1.25)):
        programs.save(module, x)
        instance = programs.load()
        assert instance.any_thread == anywhere
        np.testing.assert_array_equal(instance.execute({"x": x.numpy()})["OUTPUT__0"], np.full(2, expected))
