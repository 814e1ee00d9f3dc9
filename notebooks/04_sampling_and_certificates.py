# %% [markdown]
# # 04 Sampling, and when two tokens are both right
#
# A model gives a number for each token of its vocabulary. The sampler changes these numbers as the request asked,
# adds noise, and takes the token with the best sum. This notebook follows one row of numbers to its token, shows what
# the noise depends on, and asks when a runner that draws another token than the reference is still right.

# %%
from dataclasses import replace

import numpy as np

from conformance import figures
from conformance.certificates import DIVERGENCE, EQUAL, NEAR_TIE, Certifier, near_tie_cap
from conformance.mutants import MUTANTS
from conformance.mutation import mutated
from conformance.noise import SCHEMES, gumbel_noise, murmur3, philox, uniforms
from runner_api import (
    CachedRequestData,
    ForcedStep,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    WitnessConfig,
    group_kv_cache_specs,
    load_runner,
)

# %%
VOCAB = 64
CONFIG = RunnerConfig(max_num_reqs=8, layout="slots", record=frozenset({"logits"}))


def build(factory="cpu", config=CONFIG):
    runner = load_runner(factory, config)
    runner.load_model(WitnessConfig(vocab_size=VOCAB))
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), 64))
    return runner


def arrival(requests):
    """A plan in which requests come with two tokens each. requests: name to (parameters, seed)."""
    new = [
        NewRequestData(name, [7, 9 + i], [7, 9 + i], 0, ([1 + 4 * i, 2 + 4 * i, 3 + 4 * i, 4 + 4 * i],), params, seed)
        for i, (name, (params, seed)) in enumerate(requests.items())
    ]
    return SchedulerOutput(new, CachedRequestData(), dict.fromkeys(requests, 2), 2 * len(requests))


def go_on(names, computed):
    """A plan in which all of them decode."""
    names = list(names)
    cached = CachedRequestData(names, [computed] * len(names), [None] * len(names))
    return SchedulerOutput([], cached, dict.fromkeys(names, 1), len(names))


# %% [markdown]
# ## One row, step by step
#
# The logits are given here, so that the row is a plain one: tokens 0, 1, 2, … are less and less likely. The request
# has a bias, penalties, a temperature and three filters. Each column of the picture is one step of the sampler; a bar
# is the probability of a token if the draw came right behind that step.

# %%
logits = np.zeros((1, VOCAB), np.float32)
logits[0] = 6.0 - 0.45 * np.arange(VOCAB)
params = SamplingParams(
    temperature=0.8, logit_bias={3: 1.5, 0: -1.0}, repetition_penalty=1.3, min_p=0.02, top_k=6, top_p=0.9
)  # fmt: skip


def forced(rows, tokens):
    """Logits in place of the model's; the tokens that are imposed are those a runner would have to take anyway."""
    return ForcedStep(np.array(tokens).reshape(-1, 1), np.ones(len(tokens), np.int32), logits=rows)


runner = build()
runner.execute_model(arrival({"A": (params, 1234)}))
runner.sample_tokens(forced=forced(logits, [3]))
step = runner.last_step()
figures.sampling(step, "A")

# %% [markdown]
# The numbers behind the picture can be asked for. Every filter leaves fewer tokens, and what is out never comes back.

# %%
row = figures.sampling_data(step, "A")
for s in row.steps:
    print(f"{s.name:15} {' '.join(s.detail):22} {s.left:3} tokens left")
left = [s.left for s in row.steps]
assert left == sorted(left, reverse=True)
assert left[0] == VOCAB
assert left[-1] <= 6
assert row.drawn == row.winner == int(step.token_ids[0, 0])

# %% [markdown]
# ## The draw is a maximum
#
# To each processed logit a number is added, its *Gumbel noise*: -log(-log(1 - u)) of a uniform u. The token with the
# best sum wins. Over many draws each token wins as often as its probability says, and no sum over the vocabulary is
# needed. Here it is by hand: the noise of seed 1234 at position 1, on what the last filter left.

# %%
noise = gumbel_noise(np.array([1234]), np.array([1]), VOCAB, "murmur3")[0]
for token, x, g, score in zip(row.tokens, row.logits, row.noise, row.scores, strict=True):
    if score > -np.inf:
        print(f"token {token:2}: {x:6.3f} + {g:6.3f} = {score:6.3f}" + ("   the winner" if token == row.winner else ""))
        assert g == noise[token]
        assert np.isclose(score, x + g)
assert row.winner == row.tokens[int(np.argmax(row.scores))]

# %% [markdown]
# Does the maximum really draw from the softmax? Twenty thousand positions of one seed are twenty thousand draws.

# %%
target = np.array([0.5, 0.25, 0.15, 0.1])
for scheme in SCHEMES:
    scores = np.log(target) + gumbel_noise(np.full(20_000, 1234), np.arange(20_000), 4, scheme)
    found = np.bincount(scores.argmax(axis=1), minlength=4) / 20_000
    print(f"{scheme:8} drawn {found}  wanted {target}")
    assert np.abs(found - target).max() < 4 * 0.5 / np.sqrt(20_000)  # four standard deviations, and no more

# %% [markdown]
# ## Two schemes of noise
#
# The uniform is a hash of three numbers: the request's seed, the position, and the token's id. vLLM 0.33 hashes with
# `murmur3`, vLLM 0.26 with `philox`. The two give other tokens, each of them the same everywhere: on a CPU, on a GPU,
# in any batch.

# %%
seed, position, tokens = np.uint64([[42]]), np.uint64([[7]]), np.arange(4, dtype=np.uint64)[None, :]
words = {"murmur3": murmur3(seed, position, tokens), "philox": philox(philox(seed, position), tokens)}
for scheme, word in words.items():
    print(f"{scheme:8} words {[hex(int(w)) for w in word[0]]}  uniforms {uniforms(word, scheme)[0].round(4)}")
assert hex(int(words["murmur3"][0, 0])) == "0x661eb28d"

drawn = {}
for scheme in SCHEMES:
    runner = build(config=replace(CONFIG, noise=scheme))
    runner.execute_model(arrival({"A": (SamplingParams(), 42), "B": (SamplingParams(), 43)}))
    runner.sample_tokens()
    drawn[scheme] = runner.last_step().tokens()
print(drawn)

# %% [markdown]
# Since only seed, position and token count, a request draws the same tokens alone and among neighbours, in whatever
# row and at whatever place of the batch.


# %%
def answers(requests, steps=6):
    """The tokens that each of the requests draws."""
    runner, said = build(), {name: [] for name in requests}
    for number in range(steps):
        runner.execute_model(arrival(requests) if number == 0 else go_on(requests, 1 + number))
        for name, drawn in runner.sample_tokens().get_output().tokens().items():
            said[name] += drawn
    return said


wanted = SamplingParams(temperature=0.9, top_p=0.95)
alone = answers({"A": (wanted, 5)})
together = answers({"A": (wanted, 5), "B": (wanted, 6), "C": (SamplingParams(temperature=0.0), 7)})
print("alone   ", alone["A"], "\ntogether", together["A"])
assert alone["A"] == together["A"]

# %% [markdown]
# ## Two tokens, both right
#
# Two right runners may round differently: one computes in float32, one in float64, one sums in another order. If two
# tokens lead by less than that, each may win. Let us build such a row. The noise is known beforehand, so the logit of
# token 20 is chosen to make its sum equal to that of the winner.

# %%
plain = SamplingParams(temperature=1.0)
flat = np.zeros((1, VOCAB), np.float32)
noise = gumbel_noise(np.array([99]), np.array([1]), VOCAB, "murmur3")[0]
best = int(noise.argmax())
rival = 20
tied = flat.copy()
tied[0, rival] = np.float32(noise[best] - noise[rival])  # rounded to float32: not equal, but as close as can be
print(f"token {best} has {noise[best]:.9f}, token {rival} has {tied[0, rival] + noise[rival]:.9f}")
assert best != rival
assert abs(tied[0, rival] + noise[rival] - noise[best]) < 1e-6


def draw_of(rows, request=(plain, 99)):
    """The record of a step that drew from these logits, and the exact draw that certifies it."""
    runner, certifier, plan = build(), Certifier(CONFIG), arrival({"A": request})
    runner.execute_model(plan)
    runner.sample_tokens(forced=forced(rows, [0]))
    certifier.observe(plan)
    record = runner.last_step()
    return record, certifier.draws(record, rows)[0][0]


record, exact = draw_of(tied)
figures.sampling(record, "A")

# %% [markdown]
# A *certificate* says what is known of a token. The logits count as exact. Everything behind them is worked out in
# float64, and a bound on rounding is carried along. The exact winner is `equal`. A token behind it by less than the
# bound is a `near tie`. Anything else is a `divergence`. The margin is measured from the token whose score stays
# best if rounding does its worst: here that is token 20 itself, so that its margin is 0.

# %%
third = int(np.argsort(-noise)[1])
for token in (exact.winner, {best, rival}.difference({exact.winner}).pop(), third):
    certificate = exact.certify(token)
    print(f"{certificate.verdict:11} {certificate}")
lead, bound = abs(exact.scores[best] - exact.scores[rival]), exact.bounds[best] + exact.bounds[rival]
assert (best, rival) == (16, 20)
assert exact.certify(rival).margin == 0
print(f"the two sums differ by {lead:.2g}, and rounding may move them by {bound:.2g}")
assert exact.winner in (best, rival)
assert lead < bound
assert {exact.certify(best).verdict, exact.certify(rival).verdict} == {EQUAL, NEAR_TIE}
assert exact.certify(third).verdict == DIVERGENCE

# %% [markdown]
# The bound is narrow. Take the rival back by a thousandth, and the tie is over.

# %%
apart = tied.copy()
apart[0, rival] -= 1e-3
certificate = draw_of(apart)[1].certify(rival)
print(f"{certificate.verdict}: margin {certificate.margin:.2g}, bound {certificate.bound:.2g}")
assert certificate.verdict == DIVERGENCE
assert certificate.margin > 100 * certificate.bound

# %% [markdown]
# ## How many near ties are no accident?
#
# A judge that forgives near ties could be fooled by a runner that makes many. But how many to expect can be worked
# out: two sums come as close as d with a probability of about d. Each draw tells its share, and a run with far more
# than the sum of the shares is a fault.


# %%
def judge(factory="cpu", steps=20):
    """Draw tokens of six requests and certify each: how many of each verdict, and the near ties to be expected."""
    requests = {f"R{i}": (SamplingParams(temperature=0.9 + 0.1 * i), 50 + i) for i in range(6)}
    runner, certifier = build(factory), Certifier(CONFIG)
    verdicts, expected = dict.fromkeys((EQUAL, NEAR_TIE, DIVERGENCE), 0), 0.0
    for number in range(steps):
        plan = arrival(requests) if number == 0 else go_on(requests, 1 + number)
        runner.execute_model(plan)
        runner.sample_tokens()
        certifier.observe(plan)
        record = runner.last_step()
        for drawn, rows in zip(record.token_ids[:, 0], certifier.draws(record, record.logits), strict=True):
            certificate = rows[0].certify(int(drawn))
            verdicts[certificate.verdict] += 1
            expected += certificate.expected
        certifier.take(record.tokens())
    return verdicts, expected, record


verdicts, expected, _ = judge()
cap = near_tie_cap(sum(verdicts.values()), expected)
print(f"{verdicts}, near ties to be expected: {expected:.5f}, more than {cap:.1f} would be no accident")
assert verdicts[EQUAL] == 120
assert verdicts[DIVERGENCE] == 0

# %% [markdown]
# And a real fault? In this mutant the noise is keyed by the number of the request's row besides its seed. It draws
# from the right distribution, so that no statistics would see it. Certificates do, at once.

# %%
fault = next(m for m in MUTANTS["cpu"] if m.id == "seed-and-row")
print(fault.why)
with mutated("cpu", fault.path, fault.old, fault.new) as copy:
    verdicts, _, record = judge(copy.factory, steps=1)
print(verdicts)
assert verdicts[DIVERGENCE] >= 4
assert verdicts[NEAR_TIE] == 0
name = next(r for r in record.req_ids if figures.sampling_data(record, r).verdict == DIVERGENCE)
figures.sampling(record, name)
