"""The backend ``llamacpp``: loads, completes and checks GGUF models."""

from __future__ import annotations

from headrace import AnyInstance, Backend, DeferredInstance, Isolation, LoadError, Model, RequestInstance, dtypes
from headrace_llamacpp.parameters import Parameters


class LlamaCpp(Backend):
    """Serves ``<version>/model.gguf``, or the one ``.gguf`` there is."""

    name = "llamacpp"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    dtypes = (dtypes.BYTES, dtypes.BOOL, dtypes.INT32, dtypes.UINT32, dtypes.FP32)
    hardware = "it has run on CPUs only"
    instance_classes = (DeferredInstance, RequestInstance)
    engine_fields = ()

    def complete_config(self, model: Model) -> None:
        """Add the tensors of the contract of `headrace_llm`, from the header of the file."""
        from headrace_llamacpp.gguf import read_header
        from headrace_llamacpp.llama_server import find_weights
        from headrace_llm import ContractTensor, Task, complete_generation, complete_task

        count = ContractTensor("num_input_tokens", dtypes.UINT32, (1,))
        header = read_header(find_weights(model))
        parameters: Parameters = model.parameters
        if parameters.task == "embedding":
            width = header.number("embedding_length")
            if not width:
                raise LoadError(
                    f"the file of model '{model.name}' has no 'embedding_length', the length of its embeddings"
                )
            inputs = ContractTensor("text", dtypes.BYTES, (1,)), ContractTensor("input_ids", dtypes.INT32, (-1,))
            complete_task(
                model.config,
                Task.EMBEDDING,
                *inputs,
                ContractTensor("embedding", dtypes.FP32, (width,)),
                count,
                inputs=2,
            )
            for tensor in model.config.input:
                tensor.optional = True  # one of the two is there
        elif parameters.task == "reranking":
            texts = (ContractTensor("query", dtypes.BYTES, (1,)), ContractTensor("document", dtypes.BYTES, (1,)))
            complete_task(
                model.config, Task.RERANKING, *texts, ContractTensor("score", dtypes.FP32, (1,)), count, inputs=2
            )
        else:
            complete_generation(model.config, *(() if parameters.mmproj else ("image",)))

    def isolation(self, model: Model) -> Isolation | None:
        """Return a process: some inputs make llama.cpp end its process.

        Its threads sleep while they wait for each other. It starts no debugger when it ends.
        """
        from headrace_engines import wait_policy

        return Isolation(environ={**wait_policy(), "GGML_NO_BACKTRACE": "1"})

    def load(self, model: Model) -> AnyInstance:
        from headrace_llamacpp.instance import LlamaInstance
        from headrace_llamacpp.llama_server import find_files, open_engine
        from headrace_llamacpp.template_checks import TemplateChecks
        from headrace_llamacpp.text_vectors import EmbeddingInstance, RerankingInstance

        parameters: Parameters = model.parameters
        files = find_files(model)
        if parameters.task == "embedding":
            return EmbeddingInstance(model, open_engine(model, files))
        if parameters.task == "reranking":
            return RerankingInstance(model, open_engine(model, files))
        templates = TemplateChecks.of(model, files)  # before the engine, which has no limits
        return LlamaInstance(model, open_engine(model, files), files, templates)
