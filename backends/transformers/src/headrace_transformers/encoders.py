"""Embedding, reranking and classification: rows of texts in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace import BytesTensor, Instance, InvalidArgument, Model, Tensors
from headrace_transformers.sentence_files import SentenceFiles
from headrace_transformers.transformers_engine import OpenedTransformer, reworded_execution

NUM_INPUT_TOKENS = "num_input_tokens"


class EncoderInstance(Instance):
    """Reads texts as tokens, padded to the longest of a batch and cut off at ``max_length``."""

    def __init__(self, model: Model, opened: OpenedTransformer) -> None:
        self._opened, self._torch = opened, opened.torch
        self._sentences = SentenceFiles.of(opened.files)
        tokenizer = opened.tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        limits = (model.parameters.max_length, self._sentences.max_length, tokenizer.model_max_length, opened.context())
        self._counts_tokens = any(io.name == NUM_INPUT_TOKENS for io in model.config.output)
        self._max_length = next((limit for limit in limits if 0 < limit < 1 << 30), 0)

    def close(self) -> None:
        del self._opened

    def _counts(self, encoded: Any) -> Tensors:
        """Return ``num_input_tokens`` u32[rows, 1], if the config has this output. No rows: ``encoded`` is None."""
        if not self._counts_tokens:
            return {}
        if encoded is None:
            return {NUM_INPUT_TOKENS: np.zeros((0, 1), np.uint32)}
        return {NUM_INPUT_TOKENS: encoded["attention_mask"].sum(1, keepdim=True).cpu().numpy().astype(np.uint32)}

    def _run(self, *texts: Sequence[str]) -> tuple[Any, Any]:
        """Return the outputs of the model for one or two lists of ``texts``, and its inputs."""
        cut = {"truncation": True, "max_length": self._max_length} if self._max_length else {}
        with self._opened.tokenizing:
            made = self._opened.tokenizer(*texts, padding=True, return_tensors="pt", **cut)
        made = made.to(self._opened.device)
        with self._torch.inference_mode(), reworded_execution():
            return self._opened.model(**made), made


class Embedder(EncoderInstance):
    """``text`` BYTES[rows, 1] -> ``embedding`` f32[rows, width]."""

    def __init__(self, model: Model, opened: OpenedTransformer) -> None:
        super().__init__(model, opened)
        self._pooling = model.parameters.pooling or self._sentences.pooling
        asked = model.parameters.normalize
        self._normalizes = self._sentences.normalizes if asked is None else asked
        self._input, self._output = model.config.input[0].name, model.config.output[0].name
        self._width = opened.config.get_text_config().hidden_size

    def execute(self, inputs: Tensors) -> Tensors:
        texts = texts_of(inputs, self._input)
        if not texts:
            return {self._output: np.zeros((0, self._width), np.float32), **self._counts(None)}
        if self._sentences.lowers:
            texts = [text.lower() for text in texts]
        outputs, encoded = self._run(texts)
        vectors = _pool(self._torch, self._pooling, outputs.last_hidden_state.float(), encoded["attention_mask"])
        if self._normalizes:
            vectors = self._torch.nn.functional.normalize(vectors, dim=1)
        return {self._output: vectors.cpu().numpy(), **self._counts(encoded)}


def _pool(torch: Any, pooling: str, hidden: Any, mask: Any) -> Any:
    """Return one vector for each row of ``hidden`` f32[rows, tokens, width]. ``mask`` i64[rows, tokens] is 0 for
    padding.

    Source: sentence_transformers.models.Pooling.
    """
    if pooling == "cls":
        first = mask.argmax(1)
        return hidden[torch.arange(len(hidden)), first]
    if pooling == "last":
        last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
        return hidden[torch.arange(len(hidden)), last]
    weights = mask.unsqueeze(-1).to(hidden.dtype)
    if pooling == "max":
        return hidden.masked_fill(weights == 0, -torch.inf).amax(1)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


class Reranker(EncoderInstance):
    """``query`` and ``document`` BYTES[rows, 1] -> ``score`` f32[rows, 1]."""

    def __init__(self, model: Model, opened: OpenedTransformer) -> None:
        super().__init__(model, opened)
        self._activation = model.parameters.activation or self._sentences.activation or "sigmoid"

    def execute(self, inputs: Tensors) -> Tensors:
        queries, documents = texts_of(inputs, "query"), texts_of(inputs, "document")
        if not queries:
            return {"score": np.zeros((0, 1), np.float32), **self._counts(None)}
        outputs, encoded = self._run(queries, documents)
        scores = _activate(self._torch, self._activation, outputs.logits.float()[:, :1])
        return {"score": scores.cpu().numpy(), **self._counts(encoded)}


class Classifier(EncoderInstance):
    """``text`` BYTES[rows, 1] -> ``label`` BYTES[rows, labels] and ``score`` f32[rows, labels], the highest first."""

    def __init__(self, model: Model, opened: OpenedTransformer) -> None:
        super().__init__(model, opened)
        config = opened.config
        self._labels = [str(config.id2label.get(place, place)).encode() for place in range(config.num_labels)]
        self._activation = model.parameters.activation or _classifier_activation(config)

    def execute(self, inputs: Tensors) -> Tensors:
        texts = texts_of(inputs, "text")
        if not texts:
            empty = (0, len(self._labels))
            return {"label": BytesTensor.from_items([], empty), "score": np.zeros(empty, np.float32)}
        outputs, _ = self._run(texts)
        scores = _activate(self._torch, self._activation, outputs.logits.float()).cpu().numpy()
        order = np.argsort(-scores, axis=1, kind="stable")
        labels = [self._labels[place] for row in order for place in row]
        return {
            "label": BytesTensor.from_items(labels, scores.shape),
            "score": np.take_along_axis(scores, order, 1),
        }


def _classifier_activation(config: Any) -> str:
    """Return the activation that transformers' own text classification takes (``TextClassificationPipeline``)."""
    given = getattr(config, "function_to_apply", None)
    if given in ("none", "sigmoid", "softmax"):
        return str(given)
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _activate(torch: Any, activation: str, logits: Any) -> Any:
    if activation == "none":
        return logits
    return torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, -1)


def texts_of(inputs: Tensors, name: str) -> list[str]:
    """Return the strings of input ``name``, one per row. Raises `InvalidArgument`."""
    tensor = inputs[name]
    if not isinstance(tensor, BytesTensor):
        raise InvalidArgument(f"input '{name}' must be of type BYTES")
    try:
        return [item.decode() for item in map(bytes, tensor.items())]
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise InvalidArgument(f"input '{name}' is not UTF-8: {byte}") from None
