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

    Raises `InvalidArgument` if it is no audio file, empty, or longer than ``most_s`` seconds.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            own = file.samplerate
            if not 100 <= own <= 1_000_000 or file.channels > 64:
                raise InvalidArgument(f"the audio has {file.channels} channels at {own} samples per second")
            # The header may be wrong: the samples that are read count.
            samples = file.read(min(most_s * own + 1, 1 << 40), dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError, MemoryError) as error:
        text = one_line(str(error))[:200]
        raise InvalidArgument(f"input 'audio' is not an audio file that libsndfile reads: {text}") from None
    if not len(samples):
        raise InvalidArgument("input 'audio' has no samples")
    if len(samples) > most_s * own:
        raise InvalidArgument(f"input 'audio' is longer than {most_s} s, the limit (max_audio_s) of this model")
    mono = np.ascontiguousarray(np.nan_to_num(samples.mean(1)), np.float32)
    return resample(mono, own, rate)


def resample(samples: npt.NDArray[np.float32], own: int, rate: int) -> npt.NDArray[np.float32]:
    """Return ``samples`` at ``rate`` instead of ``own`` samples per second, by interpolation with a windowed sinc.

    Source: J. O. Smith, "Digital Audio Resampling"; torchaudio's ``resample`` computes the same.
    """
    if own == rate:
        return samples
    divisor = gcd(own, rate)
    step, phases = own // divisor, rate // divisor
    base = min(step, phases) * _ROLLOFF
    reach = int(np.ceil(_WIDTH * step / base))
    taps = np.arange(-reach, reach + step)[None, :] / step
    times = np.clip((-np.arange(phases)[:, None] / phases + taps) * base, -_WIDTH, _WIDTH)
    kernels = (np.sinc(times) * np.cos(times * np.pi / _WIDTH / 2) ** 2 * base / step).astype(np.float32)
    padded = np.pad(samples, (reach, reach + step))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernels.shape[1])[::step]
    made: npt.NDArray[np.float32] = (windows @ kernels.T).reshape(-1)
    return made[: -(-len(samples) * rate // own)]


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
