"""Calibration: parameters that are known are found again, and what cannot be known is refused or said."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv.errors import ConfigurationError
from pagedkv.simulation.calibration import MeasuredSteps, calibrate
from pagedkv.simulation.calibration.fitting import predicted_s
from pagedkv.simulation.cost import CostModel, read_cost_model
from tests.simulation.calibration.measured import drawn_steps

KNOWN = CostModel(
    fixed_s=2e-3,
    token_compute_s=4e-5,
    pair_compute_s=1e-9,
    weights_s=8e-3,
    context_token_s=5e-8,
    sequence_s=1e-5,
    several_s=1e-3,
    chunk_s=3e-3,
)
FITTED = (
    *("weights_s", "fixed_s", "token_compute_s", "pair_compute_s", "context_token_s", "sequence_s"),
    *("several_s", "chunk_s"),
)


def test_exact_steps_give_their_parameters_back() -> None:
    calibration = calibrate(drawn_steps(KNOWN))
    assert calibration.fitted == FITTED
    for name in FITTED:
        assert getattr(calibration.model, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3), name
    assert calibration.overall.p90 < 1e-4


def test_noisy_steps_give_them_nearly_back() -> None:
    calibration = calibrate(drawn_steps(KNOWN, 2000, noise=0.05))
    model = calibration.model
    assert model.token_compute_s == pytest.approx(KNOWN.token_compute_s, rel=0.05)
    assert model.context_token_s == pytest.approx(KNOWN.context_token_s, rel=0.1)
    assert model.fixed_s + model.weights_s == pytest.approx(KNOWN.fixed_s + KNOWN.weights_s, rel=0.05)
    assert 0.02 < calibration.overall.median < 0.05, "that of the noise: 0.67 of its deviation"
    assert abs(calibration.overall.bias) < 0.01


def test_an_outlier_does_not_decide() -> None:
    steps = drawn_steps(KNOWN)
    seconds = steps.seconds.copy()
    seconds[[3, 4, 100]] *= 1000
    slow = calibrate(replace(steps, seconds=seconds)).model
    assert predicted_s(slow, steps) == pytest.approx(steps.seconds, rel=0.05)


def test_errors_are_those_of_steps_that_were_not_fitted() -> None:
    random = np.random.default_rng(3)
    steps = drawn_steps(KNOWN, 20, noise=0.5)
    noise = MeasuredSteps(
        random.uniform(0.06, 0.1, 20),
        *map(steps.counts, NAMES),  # type: ignore[arg-type] # the rest are texts
    )
    calibration = calibrate(noise)
    fitted = np.abs(predicted_s(calibration.model, noise) / noise.seconds - 1)
    assert calibration.overall.p90 > np.percentile(fitted, 90)


NAMES = ("num_new_tokens", "num_attended_pairs", "num_context_tokens", "num_sequences")


def test_errors_are_told_apart_by_tokens_of_a_step() -> None:
    calibration = calibrate(drawn_steps(KNOWN))
    assert sum(each.num_steps for each in calibration.by_tokens) == 400
    assert [each.most for each in calibration.by_tokens] == sorted(each.most for each in calibration.by_tokens)
    assert all(before.most < after.least for before, after in zip(calibration.by_tokens, calibration.by_tokens[1:]))  # noqa: B905 - neighbours


def test_tokens_and_seconds_alone_suffice() -> None:
    steps = drawn_steps(CostModel(fixed_s=1e-3, weights_s=5e-3, token_compute_s=4e-5))
    calibration = calibrate(MeasuredSteps(steps.seconds, steps.num_new_tokens))
    assert calibration.fitted == ("weights_s", "fixed_s", "token_compute_s", "several_s")
    assert calibration.model.token_compute_s == pytest.approx(4e-5, rel=1e-3)
    assert any("do not determine pair_compute_s, context_token_s, sequence_s" in note for note in calibration.notes)


def test_what_steps_do_not_tell_is_kept_from_the_base() -> None:
    base = read_cost_model("gemma-3-27b/h100")
    measured = replace(base, fixed_s=3e-3, token_compute_s=2 * base.token_compute_s)
    calibration = calibrate(drawn_steps(measured, 1000), base)
    kept = {name: value for name, value in base.as_dict().items() if name not in FITTED}
    assert {name: calibration.model.as_dict()[name] for name in kept} == kept
    assert calibration.model.token_compute_s == pytest.approx(measured.token_compute_s, rel=1e-3)
    assert calibration.overall.p90 < 1e-3


def decoding(model: CostModel = KNOWN) -> MeasuredSteps:
    steps = drawn_steps(model)
    counts = steps.counts("num_sequences"), steps.counts("num_context_tokens")
    seconds = [model.step_s(int(n), int(context), int(context), int(n)) for n, context in zip(*counts, strict=True)]
    return MeasuredSteps(np.array(seconds), counts[0], counts[1], counts[1], counts[0])


def test_steps_that_only_decode_leave_prompts_to_the_base() -> None:
    calibration = calibrate(decoding(), KNOWN)
    assert calibration.model.token_compute_s == KNOWN.token_compute_s
    assert any(
        "token_compute_s, pair_compute_s, chunk_s: they are those of `base`" in note for note in calibration.notes
    )
    with pytest.raises(ConfigurationError, match=r"all 400 steps only decode, .*`base="):
        calibrate(decoding())


def test_what_cannot_be_fitted_is_refused() -> None:
    steps = drawn_steps(KNOWN)
    with pytest.raises(ConfigurationError, match="19 steps are too few"):
        calibrate(steps.chosen(np.arange(19)))
    with pytest.raises(ConfigurationError, match="all 400 steps compute 7 tokens"):
        calibrate(MeasuredSteps(steps.seconds, np.full(400, 7)))
    with pytest.raises(ConfigurationError, match="must be positive and finite"):
        calibrate(MeasuredSteps(np.where(np.arange(400) == 9, -1.0, steps.seconds), steps.num_new_tokens))
    with pytest.raises(ConfigurationError, match="num_new_tokens has 3 steps, seconds 400"):
        MeasuredSteps(steps.seconds, np.full(3, 7))


def test_predicted_steps_take_as_long_together_as_was_measured() -> None:
    """Steps vary more to the longer side, so their median is less than their mean, by which loads are decided."""
    steps = drawn_steps(KNOWN, 2000)
    longer = np.random.default_rng(5).exponential(0.3, 2000)
    slow = replace(steps, seconds=steps.seconds * (1 + longer))
    calibration = calibrate(slow)
    together = predicted_s(calibration.model, slow).sum() / slow.seconds.sum()
    assert together == pytest.approx(1.0, abs=0.02)
    assert calibration.overall.bias > 0.04, "most steps take less than the mean"


@pytest.mark.long
def test_the_error_of_sums_is_small_for_noise_and_large_where_speed_drifts() -> None:
    noisy = drawn_steps(KNOWN, 2000, noise=0.2)
    noise = calibrate(noisy)
    assert noise.of_sums < noise.overall.median / 3
    faster = np.where(np.arange(2000) < 1000, 1.0, 0.7)
    drifting = calibrate(replace(noisy, seconds=noisy.seconds * faster))
    assert 0.1 < drifting.of_sums < 0.3
    assert drifting.as_dict()["errors"]["of_sums"] == drifting.of_sums  # type: ignore[index] # a dict
