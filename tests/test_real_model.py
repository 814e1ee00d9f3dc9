"""A real model: the reference's logits and greedy tokens are those of transformers on the same weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine_core.llm import LLM
from engine_core.tokenizer import Tokenizer
from runner_api import (
    CachedRequestData,
    CheckpointError,
    NewRequestData,
    RunnerConfig,
    SamplingParams,
    SchedulerOutput,
    group_kv_cache_specs,
    load_runner,
)
from runner_api.checkpoint import load_checkpoint
from runner_api.checkpoint.smollm2 import smollm2_path

QUESTIONS = [
    "What is the capital of France?",
    "What is 2+2?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "Who wrote Hamlet?",
]
NUM_TOKENS = 64
NO_CACHED = CachedRequestData()


@pytest.fixture(scope="module")
def checkpoint():
    try:
        return load_checkpoint(smollm2_path())
    except CheckpointError as e:
        pytest.skip(f"the real model is not installed: {e}")


@pytest.fixture(scope="module")
def transformers_model(checkpoint):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    c = checkpoint.config
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, max_position_embeddings=c.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=c.tie_word_embeddings,
        attention_bias=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(np.array(checkpoint.tensor(name), np.float32)) for name in checkpoint.names()}
    model.to_empty(device="cpu")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were on the meta device
    return model.float().eval()


@pytest.mark.slow
def test_logits_over_the_whole_vocabulary(checkpoint, transformers_model):
    """max |Δ| <= 1e-5 * max |logit| for the last token of each chat prompt, computed in three chunks, all together.

    The block size is small and the blocks are in no order, so that every chunk reads across several blocks.
    """
    import torch

    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in QUESTIONS]
    prompts = {q: tokenizer.encode(t, add_special_tokens=False) for q, t in zip(QUESTIONS, texts, strict=True)}
    runner = load_runner("cpu", RunnerConfig(8, 256, 128, record=frozenset({"logits"})))
    runner.load_model(checkpoint)
    specs = {layer: replace(spec, block_size=8) for layer, spec in runner.get_kv_cache_specs().items()}
    blocks = iter(np.random.default_rng(3).permutation(np.arange(1, 64)).tolist())
    runner.initialize_kv_cache(group_kv_cache_specs(specs, 64))
    greedy, new = SamplingParams(temperature=0.0), []
    for q, ids in prompts.items():
        held = [next(blocks) for _ in range(-(-len(ids) // 8))]
        new.append(NewRequestData(q, ids, ids, 0, (held,), greedy))
    computed = dict.fromkeys(prompts, 0)
    for chunk in range(3):
        counts = {q: (len(ids) - computed[q]) // (3 - chunk) for q, ids in prompts.items()}
        assert all(counts.values())
        plan = SchedulerOutput(
            [] if chunk else new,
            CachedRequestData(list(prompts), list(computed.values()), [None] * len(prompts)) if chunk else NO_CACHED,
            counts,
            sum(counts.values()),
        )
        runner.execute_model(plan)
        drawn = runner.sample_tokens().get_output().tokens()
        assert all(bool(tokens) == (chunk == 2) for tokens in drawn.values())
        computed = {q: computed[q] + n for q, n in counts.items()}
    record = runner.last_step()
    for q, ids in prompts.items():
        ours = record.logits[record.row_of(q)]
        with torch.no_grad():
            theirs = transformers_model(torch.tensor([ids])).logits[0, -1].numpy()
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max(), q


@pytest.mark.slow
def test_greedy_answers(checkpoint, transformers_model):
    """64 greedy tokens of five chat prompts, ours in one batch with chunked prefill.

    transformers sees prompt and answer at once: if its best token after every prefix of our answer is our next one,
    then its own greedy answer is, by induction, the same.
    """
    import torch

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(checkpoint, runner="cpu", max_num_batched_tokens=48, max_model_len=256) as llm:
        outputs = llm.generate(QUESTIONS, params, chat=True)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.token_ids
        assert len(answer) == NUM_TOKENS
        with torch.no_grad():
            logits = transformers_model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist(), output.prompt
    assert "Paris" in outputs[0].text
