"""Generation by ``generate``, each request by itself on a thread of a bounded pool.

For what continuous batching does not support, such as models with an encoder, state-space models, and adapters.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headrace import BackendError, HeadraceError, Unavailable, one_line
from headrace_engines import set_torch_threads
from headrace_llm import TokenStream
from headrace_transformers.generation_job import GenerationJob
from headrace_transformers.transformers_engine import OpenedTransformer

log = logging.getLogger("headrace.transformers")


class OneByOneEngine:
    """Runs at most ``max_running`` jobs at once. Any thread."""

    most_tokens = 0

    def __init__(self, opened: OpenedTransformer, max_running: int, threads: int) -> None:
        self._opened = opened
        self._ids = itertools.count()
        self._jobs: dict[str, TokenStream] = {}
        self._pool = ThreadPoolExecutor(
            max_running, "generate", initializer=lambda: set_torch_threads(opened.torch, threads)
        )

    def submit(self, job: GenerationJob) -> str:
        """Start ``job``; return the name by which it is cancelled. Raises `Unavailable` if the engine is closed."""
        return self.submit_prompt(job.stream, lambda: job)

    def submit_prompt(self, stream: TokenStream, make: Callable[[], GenerationJob]) -> str:
        """Start the job that ``make`` returns, on the thread of the job: its prompt takes much memory, or time."""
        name = str(next(self._ids))
        self._jobs[name] = stream
        try:
            self._pool.submit(self._run, name, stream, make)
        except RuntimeError:
            raise Unavailable("the model is being unloaded") from None
        return name

    def cancel(self, name: str) -> None:
        """End the job before its next token. Does nothing if it has ended."""
        self._jobs.pop(name, None)

    def close(self) -> None:
        self._jobs.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _run(self, name: str, stream: TokenStream, make: Callable[[], GenerationJob]) -> None:
        try:
            if name in self._jobs and not stream.is_cancelled:
                job = make()
                job.start()
                self._generate(name, job)
        except HeadraceError as error:
            stream.fail(error)
        except Exception as error:
            log.warning("generation failed", exc_info=True)
            text = one_line(str(error))[:300]
            stream.fail(BackendError(f"transformers failed to generate: {type(error).__name__}: {text}"))
        finally:
            self._jobs.pop(name, None)

    def _generate(self, name: str, job: GenerationJob) -> None:
        from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
        from transformers.generation.streamers import BaseStreamer

        torch, model = self._opened.torch, job.model
        jobs, has_ended = self._jobs, False

        class PromptlessStreamer(BaseStreamer):  # type: ignore[misc]
            is_prompt = True

            def put(self, value: Any) -> None:
                nonlocal has_ended
                if self.is_prompt:
                    self.is_prompt = False
                elif not has_ended:
                    has_ended = not job.take(int(value.reshape(-1)[-1]))

            def end(self) -> None:
                """Do nothing: all tokens are taken already."""

        class Ended(StoppingCriteria):  # type: ignore[misc]
            def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
                ended = has_ended or name not in jobs
                return torch.full((input_ids.shape[0],), ended, dtype=torch.bool, device=input_ids.device)

        class Choice(LogitsProcessor):  # type: ignore[misc]
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                assert job.chooser is not None
                return job.chooser.choose(scores)

        prompt = torch.tensor([list(job.prompt)], device=self._opened.device)
        with torch.inference_mode():
            model.generate(
                prompt,
                **job.tensors_for(model),
                attention_mask=torch.ones_like(prompt),
                generation_config=job.config,
                max_new_tokens=job.max_tokens,
                streamer=PromptlessStreamer(),
                stopping_criteria=StoppingCriteriaList([Ended()]),
                logits_processor=LogitsProcessorList([] if job.chooser is None else [Choice()]),
            )
        if not has_ended and name in jobs:  # by a rule of the model's own, such as a time limit
            job.stream.finish("stop")
