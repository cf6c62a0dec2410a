"""From the bytes of an audio file to samples of one channel at the rate of a model."""

from __future__ import annotations

import io
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import InvalidArgument, LoadError, one_line

#: Zero crossings of the windowed sinc on each side, and the share of the band that is kept.
_WIDTH, _ROLLOFF = 6, 0.99
#: The most samples in a second of one channel, and of all together: decoding an hour of more would take minutes.
_MOST_RATE, _MOST_SAMPLES = 400_000, 1 << 20
#: Samples of all channels that are decoded at once, and at most so many seconds; numbers that are multiplied at once.
_PART, _PART_S, _GATHERED = 1 << 22, 600, 1 << 20
#: Where a window of long audio may end: the quietest moment of its last seconds.
_SEARCH_S, _MOMENT_S = 5.0, 0.1


def load_soundfile() -> Any:
    """Return the module ``soundfile``. Raises `LoadError` with the command that installs it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise LoadError(
            f"transcription needs the package soundfile, which cannot be imported ({error}); run: pip install "
            "'headrace-transformers[audio]'"
        ) from error
    return soundfile


def read_audio(soundfile: Any, data: bytes, rate: int, most_s: int) -> npt.NDArray[np.float32]:
    """Return the samples of the file ``data``, in one channel at ``rate`` samples per second.

    A small file may have hours of many channels, so it is decoded in parts. Raises `InvalidArgument` if it is no audio
    file, empty, or longer than ``most_s`` seconds.
    """
    parts: list[npt.NDArray[np.float32]] = []
    count = 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            own, channels = file.samplerate, file.channels
            if not 100 <= own <= _MOST_RATE or own * channels > _MOST_SAMPLES:
                raise InvalidArgument(
                    f"the audio has {channels} channels at {own} samples per second; the limit is {_MOST_RATE}, and "
                    f"{_MOST_SAMPLES} in all channels"
                )
            resampler = Resampler(own, rate)
            while count <= most_s * own:  # the header may be wrong: the samples that are read count
                samples = file.read(min(_PART // channels, _PART_S * own), dtype="float32", always_2d=True)
                if not len(samples):
                    break
                count += len(samples)
                parts.append(resampler.add(np.nan_to_num(samples.mean(1))))
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        text = one_line(str(error))[:200]
        raise InvalidArgument(f"input 'audio' is not an audio file that libsndfile reads: {text}") from None
    if not count:
        raise InvalidArgument("input 'audio' has no samples")
    if count > most_s * own:
        raise InvalidArgument(f"input 'audio' is longer than {most_s} s, the limit (max_audio_s) of this model")
    return np.concatenate([*parts, resampler.end()])


def resample(samples: npt.NDArray[np.float32], own: int, rate: int) -> npt.NDArray[np.float32]:
    """Return ``samples`` at ``rate`` instead of ``own`` samples per second."""
    resampler = Resampler(own, rate)
    return np.concatenate([resampler.add(samples), resampler.end()])


class Resampler:
    """Changes the rate of one channel, which arrives in parts, by interpolation with a windowed sinc.

    Source: J. O. Smith, "Digital Audio Resampling"; torchaudio's ``resample`` computes the same. Each sample that is
    made has its few weights: a table of all pairs would have gigabytes for rates without a common divisor.
    """

    def __init__(self, own: int, rate: int) -> None:
        self._own, self._rate, self._count, self._made = own, rate, 0, 0
        divisor = gcd(own, rate)
        self._step, phases = own // divisor, rate // divisor
        base = min(self._step, phases) * _ROLLOFF / self._step
        self._reach = int(np.ceil(_WIDTH / base))
        self._starts, rests = np.divmod(np.arange(phases) * self._step, phases)
        taps = np.arange(-self._reach, self._reach + 2)
        times = np.clip((taps[None, :] - rests[:, None] / phases) * base, -_WIDTH, _WIDTH)
        self._weights = (np.sinc(times) * np.cos(times * np.pi / _WIDTH / 2) ** 2 * base).astype(np.float32)
        self._waiting = np.zeros(self._reach, np.float32)

    def add(self, samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return the samples that are certain after ``samples``, which are the next ones."""
        self._count += len(samples)
        if self._own == self._rate:
            return np.asarray(samples, np.float32)
        self._waiting = np.concatenate([self._waiting, samples], dtype=np.float32)
        phases, width = self._weights.shape
        steps = (len(self._waiting) - width + 1) // self._step
        if steps < 1:
            return self._waiting[:0]
        made = np.empty((steps, phases), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._waiting, width)
        at_once = max(1, _GATHERED // self._weights.size)
        for first in range(0, steps, at_once):
            places = np.arange(first, min(first + at_once, steps))[:, None] * self._step + self._starts
            made[first : first + at_once] = np.einsum("spw,pw->sp", windows[places], self._weights)
        self._waiting = self._waiting[steps * self._step :]
        self._made += made.size
        return made.reshape(-1)

    def end(self) -> npt.NDArray[np.float32]:
        """Return the rest."""
        count = self._count
        if self._own == self._rate:
            return np.zeros(0, np.float32)
        left = -(-count * self._rate // self._own) - self._made
        return self.add(np.zeros(self._step + self._weights.shape[1], np.float32))[:left]


def windows_of(samples: npt.NDArray[np.float32], rate: int, window_s: int) -> list[npt.NDArray[np.float32]]:
    """Return ``samples`` in parts of at most ``window_s`` seconds, cut where they are quietest."""
    parts, most, moment = [], window_s * rate, max(1, int(_MOMENT_S * rate))
    while len(samples) > most:
        start = most - min(most // 4, int(_SEARCH_S * rate))  # each part is at least three quarters of a window
        late = np.square(samples[start:most])
        energy = np.add.reduceat(late, np.arange(0, len(late), moment))
        cut = start + int(energy.argmin()) * moment + moment // 2
        parts.append(samples[:cut])
        samples = samples[cut:]
    return [*parts, samples]
