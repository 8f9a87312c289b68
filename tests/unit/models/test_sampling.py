"""Drawing tokens: random numbers, distributions, kept sets and their log-probs, against slow references."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tithe.models.sampling import logp_rows, philox, sample_rows

BINS = 37


@dataclass
class Drawn:
    token: np.ndarray
    logp: np.ndarray
    behaviour: np.ndarray


def draw(
    logits: np.ndarray,
    counters: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    n_tokens: int | None = None,
) -> Drawn:
    """One token a row of counters (seed, group, sample, position); one row of logits serves all."""
    rows = len(counters)
    z = np.ascontiguousarray(np.broadcast_to(logits.astype(np.float32), (rows, logits.shape[-1])))
    parts = [
        np.full(rows, 0.0 if temperature == 0 else 1.0 / temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        np.full(rows, min_p, np.float32),
        np.ascontiguousarray(counters, np.int64),
    ]
    out = Drawn(np.full(rows, -1, np.int32), np.zeros(rows, np.float32), np.zeros(rows, np.float32))
    arrays = [*parts, out.token, out.logp, out.behaviour]
    args = [z.ctypes.data, z.shape[1], n_tokens or z.shape[1], *(a.ctypes.data for a in arrays)]
    sample_rows.bind(rows, args).run()
    return out


def counters(n: int, *, vary: str = "position", seed: int = 3) -> np.ndarray:
    columns = {"seed": seed, "group": 5, "sample": 1, "position": 9}
    return np.stack([np.arange(n) if name == vary else np.full(n, value) for name, value in columns.items()], axis=1)


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    z = logits.astype(np.float32).astype(np.float64) / temperature
    weights = np.exp(z - z.max())
    return weights / weights.sum()


def kept_set(p: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The slow reference: top-k, then top-p of what is left, then min-p; bool [V]."""
    kept = np.ones(len(p), bool)
    if 0 < top_k < len(p):
        kept &= p >= np.sort(p)[-top_k]
    if top_p < 1:
        order = np.argsort(-p, kind="stable")
        order = order[kept[order]]
        enough = np.cumsum(p[order]) >= top_p * p[kept].sum()
        kept &= p >= p[order[np.argmax(enough)]]
    return kept & (p >= min_p * p.max())


# ------------------------------------------------------------------ random numbers


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB),
        ),
    ],
)
def test_philox_gives_random123s_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, int]
) -> None:
    def signed(low: int, high: int) -> np.int64:
        return np.uint64(low | high << 32).astype(np.int64)

    value = philox(signed(*key), signed(*counter[:2]), np.int64(counter[2]), np.int64(counter[3]))
    assert value == ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


# ------------------------------------------------------------------ distributions


def assert_drawn_from(tokens: np.ndarray, p: np.ndarray) -> None:
    """χ² below its 99.9 % quantile (Wilson and Hilferty's formula). Seeds are fixed: a pass is a pass for ever."""
    expected = p * len(tokens)
    assert expected.min() > 5, "the test needs every token to be expected a few times"
    chi2 = ((np.bincount(tokens, minlength=len(p)) - expected) ** 2 / expected).sum()
    share = 2 / (9 * (len(p) - 1))
    assert chi2 < (len(p) - 1) * (1 - share + 3.09 * share**0.5) ** 3


@pytest.mark.parametrize("vary", ["seed", "group", "sample", "position"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_tokens_follow_the_softmax_along_every_counter(vary: str, temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 1.0, BINS)
    tokens = draw(logits, counters(20_000, vary=vary), temperature=temperature).token
    assert_drawn_from(tokens, probabilities(logits, temperature))


def test_a_vocabulary_of_many_chunks_is_drawn_in_proportion() -> None:
    """1,400 tokens in chunks of 512; tokens are counted in 37 bins that cross the chunks' borders."""
    logits = np.random.default_rng(1).normal(0, 1.5, 1400)
    tokens = draw(logits, counters(20_000)).token
    bins = np.arange(1400) * BINS // 1400
    expected = np.bincount(bins, weights=probabilities(logits), minlength=BINS)
    assert_drawn_from(bins[tokens], expected)


@pytest.mark.parametrize("limits", [{"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_a_kept_set_is_drawn_in_proportion(limits: dict[str, float]) -> None:
    logits = np.random.default_rng(2).normal(0, 1.0, BINS)
    p = probabilities(logits)
    kept = kept_set(p, limits.get("top_k", 0), limits.get("top_p", 1.0), limits.get("min_p", 0.0))
    tokens = draw(logits, counters(20_000), **limits).token
    assert kept[tokens].all()
    index = np.cumsum(kept) - 1
    assert_drawn_from(index[tokens], p[kept] / p[kept].sum())


# ------------------------------------------------------------------ kept sets and log-probs


@pytest.mark.parametrize("n", [5, 37, 600, 1100])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_kept_sets_and_behaviour_log_probs_are_the_references(n: int, temperature: float) -> None:
    rng = np.random.default_rng([n, int(10 * temperature)])
    for _ in range(25):
        logits = rng.normal(0, rng.uniform(0.5, 4), n)
        top_k = int(rng.choice([0, 1, 2, n // 2, n, n + 7]))
        top_p, min_p = float(np.float32(rng.choice([1.0, 0.05, 0.5, 0.9]))), float(rng.choice([0.0, 0.02, 0.3]))
        p = probabilities(logits, temperature)
        kept = kept_set(p, top_k, top_p, min_p)
        drawn = draw(logits, counters(40), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        assert kept[drawn.token].all()
        np.testing.assert_allclose(drawn.logp, np.log(p[drawn.token]), rtol=0, atol=1e-5)
        np.testing.assert_allclose(drawn.behaviour, np.log(p[drawn.token] / p[kept].sum()), rtol=0, atol=1e-5)


def test_without_limits_both_log_probs_are_one_number() -> None:
    drawn = draw(np.random.default_rng(3).normal(0, 3, 700), counters(100))
    np.testing.assert_array_equal(drawn.logp, drawn.behaviour)


def test_top_k_one_and_top_p_zero_take_the_best_token_with_certainty() -> None:
    logits = np.random.default_rng(4).normal(0, 1, 300)
    for limits in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        drawn = draw(logits, counters(50), **limits)
        assert (drawn.token == logits.argmax()).all()
        np.testing.assert_array_equal(drawn.behaviour, np.zeros(50))


def test_ties_at_the_limit_are_all_kept() -> None:
    logits = np.array([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    tokens = draw(logits, counters(2000), top_k=2).token
    assert set(tokens.tolist()) == {1, 2, 3, 4}


def test_temperature_divides_logits_before_the_softmax() -> None:
    """Case C19: not after it, and not at all would be -0.8152 and -0.4076."""
    logits = np.array([2.0, 1.0, 0.0])
    drawn = draw(logits, counters(200), temperature=0.5)
    assert drawn.logp[drawn.token == 0][0] == pytest.approx(-0.1429, abs=1e-4)
    assert score(logits[None], [0], temperature=0.5)[0][0] == pytest.approx(-0.1429, abs=1e-4)


@pytest.mark.parametrize("n", [16, 777])
def test_log_probs_are_torchs_log_softmax(n: int) -> None:
    logits = np.random.default_rng(n).normal(0, 6, n)
    for temperature in (0.6, 1.0, 1.3):
        drawn = draw(logits, counters(64), temperature=temperature)
        theirs = torch.log_softmax(torch.from_numpy(logits.astype(np.float32)) / temperature, -1).numpy()
        np.testing.assert_allclose(drawn.logp, theirs[drawn.token], rtol=0, atol=1e-5)


def test_greedy_takes_the_first_best_token_at_temperature_one() -> None:
    logits = np.array([0.5, 3.0, -1.0, 3.0, 1.0])
    drawn = draw(logits, counters(8), temperature=0.0, top_k=1, top_p=0.1)
    assert (drawn.token == 1).all()
    np.testing.assert_allclose(drawn.logp, np.log(probabilities(logits)[1]), rtol=0, atol=1e-6)
    assert (drawn.behaviour == 0).all()


def test_greedy_finds_the_best_token_anywhere() -> None:
    for place in (0, 15, 16, 511, 512, 1000, 1002):
        logits = np.zeros(1003)
        logits[place] = 1.0
        assert draw(logits, counters(1), temperature=0.0).token[0] == place


# ------------------------------------------------------------------ what a token may and may not depend on


@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.01}, {"temperature": 0.0}])
def test_padded_vocabulary_is_never_sampled_and_never_counted(limits: dict[str, float]) -> None:
    """Case D25: rows of the file beyond the tokenizer, even with the largest logits."""
    logits = np.random.default_rng(5).normal(0, 1, 40)
    logits[36:] = 50.0
    padded = draw(logits, counters(500), n_tokens=36, **limits)
    alone = draw(logits[:36], counters(500), **limits)
    assert padded.token.max() < 36
    for mine, theirs in zip((padded.token, padded.logp, padded.behaviour), vars(alone).values(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_token_depends_on_its_own_counter_only() -> None:
    logits = np.random.default_rng(6).normal(0, 2, 900)
    for limits in ({}, {"top_k": 30, "top_p": 0.9}):
        together = draw(logits, counters(60), **limits)
        for i in (0, 17, 59):
            alone = draw(logits, counters(60)[i : i + 1], **limits)
            assert (alone.token[0], alone.logp[0], alone.behaviour[0]) == (
                together.token[i],
                together.logp[i],
                together.behaviour[i],
            )


def test_a_changed_counter_field_changes_the_tokens() -> None:
    logits = np.zeros(1000)
    base = draw(logits, counters(50)).token
    for column in range(3):
        other = counters(50)
        other[:, column] += 1
        assert (draw(logits, other).token != base).mean() > 0.9


def test_impossible_tokens_are_never_drawn() -> None:
    logits = np.zeros(600)
    logits[::2] = -np.inf
    drawn = draw(logits, counters(4000))
    assert (drawn.token % 2 == 1).all()
    assert np.isfinite(drawn.logp).all()


# ------------------------------------------------------------------ scoring


def score(
    logits: np.ndarray, targets: list[int], *, temperature: float = 1.0, n_tokens: int | None = None, bf16: bool = False
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """(logp, entropy, p, p·(log p + H)) of every row."""
    z = np.ascontiguousarray(logits, np.float32)
    rows, width = z.shape
    ids = np.array(targets, np.int32)
    inverse = np.full(rows, 1 / temperature, np.float32)
    logp, entropy = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
    p = torch.zeros(rows, width, dtype=torch.bfloat16 if bf16 else torch.float32)
    w = torch.zeros_like(p)
    args = [z.ctypes.data, width, n_tokens or width, *(a.ctypes.data for a in (inverse, ids, logp, entropy))]
    logp_rows.bind(rows, [*args, p.data_ptr(), width, int(bf16), w.data_ptr()]).run()
    return logp, entropy, p, w


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("n", [16, 100, 1300])
def test_scoring_is_torchs_log_softmax_and_entropy(n: int, temperature: float) -> None:
    logits = np.random.default_rng(n).normal(0, 3, (5, n))
    targets = [0, 1, n // 2, n - 2, n - 1]
    logp, entropy, p, w = score(logits, targets, temperature=temperature)
    theirs = torch.log_softmax(torch.from_numpy(logits.astype(np.float32)).double() / temperature, -1)
    h = -(theirs.exp() * theirs).sum(-1)
    np.testing.assert_allclose(logp, theirs[range(5), targets], rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy, h, rtol=0, atol=1e-5)
    torch.testing.assert_close(p.double(), theirs.exp(), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(w.double(), theirs.exp() * (theirs + h[:, None]), rtol=0, atol=1e-6)


def test_scoring_in_bf16_rounds_the_distributions_only() -> None:
    logits = np.random.default_rng(9).normal(0, 3, (4, 75))
    logp, entropy, p, w = score(logits, [0, 9, 30, 74])
    logp16, entropy16, p16, w16 = score(logits, [0, 9, 30, 74], bf16=True)
    np.testing.assert_array_equal(logp, logp16)
    np.testing.assert_array_equal(entropy, entropy16)
    assert torch.equal(p16, p.bfloat16())
    assert torch.equal(w16, w.bfloat16())


def test_scoring_leaves_the_padded_vocabulary_out() -> None:
    logits = np.random.default_rng(10).normal(0, 3, (3, 40))
    logits[:, 36:] = 50.0
    padded = score(logits, [0, 1, 35], n_tokens=36)
    alone = score(logits[:, :36], [0, 1, 35])
    np.testing.assert_array_equal(padded[0], alone[0])
    np.testing.assert_array_equal(padded[1], alone[1])
    assert torch.equal(padded[2][:, :36], alone[2])
    assert (padded[2][:, 36:] == 0).all()


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_a_drawn_token_is_scored_with_the_bits_it_was_drawn_with(temperature: float) -> None:
    logits = np.random.default_rng(11).normal(0, 3, 1100)
    drawn = draw(logits, counters(64), temperature=temperature, top_p=0.9)
    z = np.broadcast_to(logits, (64, 1100))
    logp, *_ = score(z, drawn.token.tolist(), temperature=temperature)
    np.testing.assert_array_equal(logp, drawn.logp)
