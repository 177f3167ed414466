"""Tokens that the device draws alone beside those of the sampler: how many differ, and whether each may.

    python -m benchmarks.device.draws [--rows 1000000] [--only "top-p 0.8"] [--first 0] [--seconds 600]

Both take the same scores and the same noise. Decision 28 allows a difference in two cases: the two greatest sums of a
score and its noise are less than 1e-3 apart, or a token lies on the edge of what a filter keeps, up to rounding. Every
row that differs is computed again in float64 and classed; one that is neither ends the run with 1.
"""

import argparse
import sys
from collections import Counter
from time import perf_counter
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from pagedkv.engine import SamplingParams
from pagedkv.engine.sampling import BatchSampler, Place, SampledSequence
from pagedkv.engine.sampling.drawing import gumbel, keys_of, words

VOCABULARY: Final = 2048
BATCH: Final = 1024
BATCHES_A_SEED: Final = 16
EDGE: Final = 1e-6
CLOSE: Final = 1e-3

Scores = npt.NDArray[np.float64]

FLAT: Final = 2.0
"""Standard deviation of scores, of which hundreds of tokens have 0.8 of the mass; the sampler sorts such rows."""
PEAKED: Final = 6.0
"""Of these a few tokens have, as of a trained model."""
SETTINGS: Final = {
    "a temperature alone": (SamplingParams(temperature=0.8), FLAT),
    "top-k 50": (SamplingParams(temperature=1.0, top_k=50), FLAT),
    "top-p 0.8": (SamplingParams(temperature=1.0, top_p=0.8), FLAT),
    "top-p 0.8, peaked": (SamplingParams(temperature=1.0, top_p=0.8), PEAKED),
    "top-p 0.95": (SamplingParams(temperature=0.7, top_p=0.95), FLAT),
    "top-p 0.95, peaked": (SamplingParams(temperature=0.7, top_p=0.95), PEAKED),
    "min-p 0.05": (SamplingParams(temperature=1.0, min_p=0.05), FLAT),
    "all three": (SamplingParams(temperature=0.9, top_k=100, top_p=0.9, min_p=0.01), FLAT),
    "all three, peaked": (SamplingParams(temperature=0.9, top_k=100, top_p=0.9, min_p=0.01), PEAKED),
    "penalties": (SamplingParams(temperature=1.0, top_k=50, repetition_penalty=1.2, presence_penalty=0.3), FLAT),
}


def compare(name: str, device: torch.device, rows: range, seconds: float) -> Counter[str]:
    """Draw rows both ways, for so long at most; count those that are equal, and the others by why they may differ.

    Args:
        name: of the setting.
        device: where both are drawn.
        rows: numbers of rows, by which they have other seeds, and the first of which gives the scores.
    """
    (params, spread), begun = SETTINGS[name], perf_counter()
    own = BatchSampler(VOCABULARY, draws_ahead=False)
    ahead = BatchSampler(VOCABULARY, draws_ahead=True)
    found: Counter[str] = Counter()
    generator = torch.Generator(device).manual_seed(len(name) + rows.start)
    places: list[Place] = []
    for number in range(-(-len(rows) // BATCH)):
        if perf_counter() - begun > seconds:
            break
        if number % BATCHES_A_SEED == 0:
            places = [Place(_sequence(params, rows.start + number * BATCH + row)) for row in range(BATCH)]
        scores = torch.randn(BATCH, VOCABULARY, generator=generator, device=device) * spread
        tokens = [sampler.begin(scores, places).wait().token_ids.cpu().numpy() for sampler in (own, ahead)]
        differs = np.flatnonzero(tokens[0] != tokens[1])
        found["equal"] += BATCH - len(differs)
        for row in differs:
            pair = int(tokens[0][row]), int(tokens[1][row])
            found[_why(scores[row].double().cpu().numpy(), places[row], pair)] += 1
    return found


def _sequence(params: SamplingParams, seed: int) -> SampledSequence:
    drawn = [(seed + step) % VOCABULARY for step in range(0, 60, 7)]
    return SampledSequence(params, [1, 2, 3], vocab_size=VOCABULARY, seed=seed, generated_ids=drawn)


def _why(scores: Scores, place: Place, pair: tuple[int, int]) -> str:
    """Class a difference, by probabilities and noise in float64."""
    params = place.sequence.params
    if params.repetition_penalty != 1.0 or params.presence_penalty:
        return "unclassed: penalties"
    scaled = scores / params.temperature
    where = (place.sequence.seed, place.sequence.sample, place.sequence.position(place.drafts))
    key = keys_of(*(torch.tensor([number]) for number in where))
    sums = scaled[list(pair)] + gumbel(words(key, torch.tensor(pair))).numpy()
    if abs(sums[0] - sums[1]) < CLOSE:
        return "sums less than 1e-3 apart"
    distance = min(_distance_to_edge(scaled, token, params) for token in pair)
    return f"on an edge ({distance:.1e})" if distance < EDGE else f"UNEXPLAINED ({distance:.1e} from an edge)"


def _distance_to_edge(scaled: Scores, token: int, params: SamplingParams) -> float:
    """Return how far a token's mass is from what top-p, or its probability from what min-p keeps."""
    kept = np.sort(scaled)[::-1]
    if params.top_k:
        kept = kept[: params.top_k]
    weights = np.exp(kept - kept[0])
    weights /= weights.sum()
    distances = [np.inf]
    if params.top_p < 1.0:
        distances.append(abs(weights[kept > scaled[token]].sum() - params.top_p))
    if params.min_p:
        distances.append(abs(np.exp(scaled[token] - kept[0]) - params.min_p))
    return float(min(distances))


def main() -> int:
    """Compare each setting, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--only", action="append", choices=SETTINGS)
    parser.add_argument("--first", type=int, default=0, help="number of the first row: other rows, other draws")
    parser.add_argument("--seconds", type=float, default=np.inf, help="end each setting after so long")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_right = True
    for name in given.only or SETTINGS:
        begun = perf_counter()
        found = compare(name, device, range(given.first, given.first + given.rows), given.seconds)
        others = ", ".join(f"{count} {why}" for why, count in sorted(found.items()) if why != "equal")
        seconds = perf_counter() - begun
        print(f"{name}: {found['equal']:,} equal; {others or 'none differs'} ({seconds:.0f} s)", flush=True)
        is_right &= not any(why.startswith(("UN", "un")) for why in found)
    return not is_right


if __name__ == "__main__":
    sys.exit(main())
