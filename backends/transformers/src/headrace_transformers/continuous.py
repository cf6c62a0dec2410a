"""Generation by transformers' continuous batching: requests are added to the batch and removed from it at every step.

Its manager takes the highest scores (``do_sample=False``). A processor of logits maps each row to its request, and
calls its chooser (`headrace_transformers.token_choice`). Results are taken on the thread of the generation loop,
without an event loop in between.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from contextlib import suppress
from typing import Any

from headrace import BackendError, Unavailable, one_line
from headrace_engines import set_torch_threads
from headrace_transformers.generation_job import GenerationJob
from headrace_transformers.transformers_engine import OpenedTransformer, release_memory

log = logging.getLogger("headrace.transformers")

PAGE_TOKENS = 64
#: The memory for the cache of an instance on the CPU, unless the model's parameters say otherwise.
CPU_CACHE_BYTES = 1 << 30


class ContinuousEngine:
    """Runs jobs in one batch. Any thread.

    Raises an exception of transformers if the model does not support it.
    """

    def __init__(self, opened: OpenedTransformer, max_running: int, cache_tokens: int, threads: int) -> None:
        self._opened, self._threads = opened, threads
        self._max_running = max_running
        self._cache_tokens = cache_tokens or _default_cache_tokens(opened)
        self._ids = itertools.count()
        self._jobs: dict[str, GenerationJob] = {}
        self._lock = threading.Lock()
        self._is_closed = False
        self._manager: Any = self._start()

    @property
    def most_tokens(self) -> int:
        """The most tokens of a request, prompt and answer together; 0 for no limit of its own."""
        return max(0, self._cache_tokens - PAGE_TOKENS)

    def submit(self, job: GenerationJob) -> str:
        """Start ``job``; return the name by which it is cancelled. Blocks while a generation loop is started again.

        Raises `Unavailable` if the engine is closed.
        """
        name = str(next(self._ids))
        self._jobs[name] = job
        try:
            with self._lock:
                self._add(name, job)
        except BaseException:
            self._jobs.pop(name, None)
            raise
        job.note_prompt()
        return name

    def _add(self, name: str, job: GenerationJob) -> None:
        """Give ``job`` to the loop, or to a new one if it ends. ``_lock`` is held."""
        for _ in range(2):
            if self._is_closed:
                raise Unavailable("the model is being unloaded")
            if self._manager is None or not self._manager.is_running():
                log.warning("starting the generation loop again")
                self._stop()
                release_memory()  # there may be no memory for a second cache
                self._manager = self._start()
            job.loop = self._manager
            added = self._manager.add_request(
                list(job.prompt),
                request_id=name,
                max_new_tokens=job.max_tokens,
                streaming=True,
                eos_token_id=list(job.eos) or -1,
            )
            if added is not None:
                return
            self._stop()  # the loop is ending: wait for that
        raise BackendError(f"transformers failed to generate: {self._trouble}")

    def _stop(self) -> None:
        """End the loop. `release_memory` then frees its cache."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, hard_stop=True)
            manager.destroy()

    def _recover(self, loop: Any, reason: str) -> None:
        """Move the jobs that ``loop`` had not started when it ended to a new loop, once. Fail its other jobs."""
        with self._lock:
            for name, job in tuple(self._jobs.items()):
                if job.loop is not loop:
                    continue
                if job.has_started or job.is_retried:
                    self._fail(name, reason)
                    continue
                job.is_retried = True
                try:
                    self._add(name, job)
                except Exception as error:
                    self._fail(name, one_line(str(error)))

    def cancel(self, name: str) -> None:
        """Take the job out of the batch. Does nothing if it has ended."""
        if self._jobs.pop(name, None) is not None:
            manager = self._manager
            if manager is not None:
                manager.cancel_request(name)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._stop()
        for name in tuple(self._jobs):
            self._fail(name, "the model is being unloaded")

    def _start(self) -> Any:
        from transformers import GenerationConfig, LogitsProcessorList
        from transformers.generation import ContinuousBatchingConfig
        from transformers.generation.continuous_batching import cb_logits_processors, continuous_api

        engine = self
        #: Why the generation loop has ended, for jobs that it has not taken yet.
        self._trouble = "the generation loop has ended"

        class Router(continuous_api.OutputRouter):  # type: ignore[misc]
            def deliver(self, output: Any) -> None:
                engine._take(output)

            def deliver_batch(self, outputs: list[Any]) -> None:
                for output in outputs:
                    engine._take(output)

        class Chooser(cb_logits_processors.ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
            supported_kwargs: dict[str, type] = {}  # noqa: RUF012
            ignored_kwargs = ()
            names: list[str] = []  # noqa: RUF012

            def fill_defaults(self, int32_tensor: Any) -> None:
                int32_tensor.zero_()

            def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Any:
                self.names = [each.state.request_id for each in requests_with_new_token]
                engine._note_starts(self.names)
                return engine._opened.torch.zeros(len(self.names), dtype=engine._opened.torch.int32)

            def __call__(self, scores: Any, tensor_arg: Any) -> Any:
                return engine._choose(self.names, scores)

        opened = self._opened
        limits = {} if opened.device != "cpu" and not self._cache_tokens else {
            # Its name until transformers 5.17 is the second one.
            "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size": PAGE_TOKENS,
            "num_blocks": -(-self._cache_tokens // PAGE_TOKENS),
        }  # fmt: skip
        manager = opened.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=self._max_running,
                max_batch_tokens=1024 if opened.device == "cpu" else None,
                use_cuda_graph=False,  # rows are chosen by Python code, which a graph cannot hold
                use_async_batching=False,
                **limits,
            ),
        )
        manager.output_router = Router()
        processors = cb_logits_processors.ContinuousBatchingLogitsProcessorList(LogitsProcessorList([Chooser()]))
        processors.tensors_required = 1
        manager.logit_processor = processors
        manager.warmup()  # makes the cache, and so raises what is wrong here
        run, fail_all = manager._run_generation_loop, manager._fail_all_remaining_requests

        def loop(*args: Any, **kwargs: Any) -> None:
            set_torch_threads(opened.torch, self._threads)
            try:
                run(*args, **kwargs)
            finally:
                if not self._is_closed:
                    ended = (manager, self._trouble)
                    threading.Thread(target=self._recover, args=ended, name="generation recovery").start()

        def fail_taken(*args: Any, **kwargs: Any) -> None:
            with suppress(queue.Empty):
                while True:  # requests that the loop has not taken stay in ``_jobs``
                    manager.input_queue.get_nowait()
            fail_all(*args, **kwargs)

        manager._run_generation_loop, manager._fail_all_remaining_requests = loop, fail_taken
        with opened.torch.inference_mode():
            manager.start()
        return manager

    def _note_starts(self, names: list[str]) -> None:
        for name in names:
            job = self._jobs.get(name)
            if job is not None and not job.has_started:
                job.start()

    def _choose(self, names: list[str], scores: Any) -> Any:
        for row, name in enumerate(names):
            job = self._jobs.get(name)
            if job is not None and job.chooser is not None:
                try:
                    scores[row] = job.chooser.choose(scores[row : row + 1])[0]
                except Exception as error:
                    log.exception("choosing a token failed")
                    self.cancel(name)
                    job.fail(BackendError(f"choosing a token failed: {type(error).__name__}: {error}"))
        return scores

    def _take(self, output: Any) -> None:
        name = output.request_id
        job = self._jobs.get(name)
        if job is None:
            return
        if output.error is not None:
            self._trouble = str(output.error)
            self._fail(name, output.error)
        elif output.is_finished():
            del self._jobs[name]
            job.take(output.generated_tokens[-1])
        elif not job.take(output.generated_tokens[-1]):
            self.cancel(name)

    def _fail(self, name: str, reason: str) -> None:
        job = self._jobs.pop(name, None)
        if job is not None:
            job.fail(BackendError(f"transformers failed to generate: {reason}"))


def _default_cache_tokens(opened: OpenedTransformer) -> int:
    """Return 0 on a GPU: transformers takes most of its free memory."""
    if opened.device != "cpu":
        return 0
    config = opened.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * heads * size * opened.model.dtype.itemsize
    return max(4 * PAGE_TOKENS, min(16 * (opened.context() or 1 << 16), CPU_CACHE_BYTES // int(token_bytes)))
