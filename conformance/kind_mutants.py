"""Faults that fill the table of kinds: those that metamorphic laws are about, and every kind in dense rows.

See `conformance.mutants`, and `conformance.mutant_kinds` for the table.
"""

from __future__ import annotations

from conformance.mutant import Mutant
from conformance.mutant import mutant as _m

_GUMBEL, _RUNNER, _GRAMMAR = "sample/gumbel.py", "runner.py", "sample/grammar.py"

METAMORPHIC_MUTANTS: tuple[Mutant, ...] = (
    _m("seeds-in-sorted-order", _GUMBEL,
       "seeds[rows][random]", "np.sort(seeds[rows][random])",
       "META-001 META-012", "K12", "Seeds of a batch are handed out in the order of their values."),
    _m("seed-and-parity-of-row", _GUMBEL,
       "seeds[rows][random]", "(seeds[rows] ^ (rows & 1))[random]",
       "META-002", "K12", "The noise is keyed by the seed and the last bit of the row's number."),
    _m("first-block-taken-for-the-null-block", "kv_cache.py",
       "owned = slot_mapping >= 0", "owned = slot_mapping >= 2 * key_cache.shape[1]",
       "META-003", "K5", "Tokens of the first block behind the null block are not stored."),
    _m("discarded-samples-observed", _RUNNER,
       "self.sampler.observe(self.idx_mapping[:r], token_ids, self.num_sampled[:r])",
       "self.sampler.observe(self.idx_mapping[:r], token_ids, np.ones_like(self.num_sampled[:r]))",
       "META-004", "K15", "The sampler is told of the token that an unfinished prefill has not drawn."),
    _m("seed-changes-on-resumption", "sample/sampler.py",
       "self.seeds[row] = new.seed", "self.seeds[row] = new.seed + len(new.prefill_token_ids) - new.prompt_len",
       "META-005", "K12", "A request that comes back with outputs draws by another seed."),
    _m("noise-counts-padding-tokens", _RUNNER,
       "self.positions[rows], self.input_ids[rows],",
       "self.positions[rows] + batch.num_tokens_padded - batch.num_tokens, self.input_ids[rows],",
       "META-006", "K4", "The position that noise is keyed by counts the padding of the step."),
    _m("noise-keyed-by-a-large-batch", _GUMBEL,
       "seeds[rows][random]", "(seeds[rows] + (num_logits > 5))[random]",
       "META-007", "K12", "Batches of more than five rows draw by other seeds."),
    _m("new-blocks-at-a-blocks-end-alone", _RUNNER,
       "if block_ids is not None:\n                tables",
       "if block_ids is not None and computed % min(tables.block_sizes) == 0:\n                tables",
       "META-018", "K8", "Blocks that come before the last one is full are taken for a mistake and left out."),
    _m("greedy-takes-the-second-best", _GUMBEL,
       "    winner = scores.argmax(axis=1)\n",
       "    greedy = (expanded_idx_mapping[:num_logits] >= 0) & (temperature[expanded_idx_mapping[:num_logits]] == 0)\n"
       "    winner = np.where(greedy, np.argsort(scores, axis=1)[:, -2], scores.argmax(axis=1))\n",
       "OUT-004", "K13", "Greedy requests get the second best token, always the same one."),
    _m("bad-words-if-the-last-has-some", "sample/bad_words.py",
       "self.num_bad_words[batch_rows].any()", "self.num_bad_words[batch_rows[-1:]].any()",
       "META-002 SAMPLE-023", "K10", "The last request of the batch says whether anybody's bad words are looked at."),
    _m("prefix-hit-one-too-many", _RUNNER,
       "new.prefill_token_ids, new.num_computed_tokens)",
       "new.prefill_token_ids, new.num_computed_tokens - (new.num_computed_tokens > 0))",
       "META-008", "K8", "Behind a prefix from the cache the last cached token is computed again, and the first that "
       "is not stays behind."),
    _m("noise-keyed-by-name", "sample/sampler.py",
       "self.seeds[row] = new.seed", "self.seeds[row] = new.seed ^ len(new.req_id)",
       "META-011", "K12", "The noise is keyed by the request's name too."),
    _m("batch-of-one-is-greedy", _GUMBEL,
       "(temperature[rows] != 0)", "(temperature[rows] != 0) & (num_logits > 1)",
       "META-012", "K10", "A batch of one takes the path that is made for greedy ones."),
    _m("logits-of-no-context", "models/witness.py",
       "hidden_states + self._vocab[None, :]", "hidden_states * np.uint64(0) + self._vocab[None, :]",
       "META-015", "K8", "Logits are the same whatever was said."),
    _m("query-sees-itself-alone", "models/witness.py",
       "first = np.zeros_like(at) if window is None", "first = at if window is None",
       "ATTN-001", "K8", "A query without a window sees nothing of its context."),
    _m("seed-ignored", _GUMBEL,
       "seeds[rows][random]", "seeds[rows][random] * 0",
       "META-016 SAMPLE-002", "K12", "All requests draw by one seed."),
    _m("seed-of-the-names-first-owner", "sample/sampler.py",
       "self.seeds[row] = new.seed",
       "self.seeds[row] = self.__dict__.setdefault('_known', {}).setdefault(new.req_id, new.seed)",
       "META-019", "K1", "Who bears the name of an earlier request draws by the seed of that one."),
    _m("caches-shared-by-runners", "kv_cache.py",
       "caches[layer] = (np.zeros(shape, kind), np.zeros(shape, kind))",
       "made, pair = allocate_kv_cache.__dict__, (np.zeros(shape, kind), np.zeros(shape, kind))\n"
       "            caches[layer] = made.setdefault(f'{layer} {shape}', pair)",
       "META-020", "K2", "The KV cache belongs to the program: all its runners write to one."),
)  # fmt: skip

# Parameters that do not do what they say, in a way that outputs alone show.
OUTPUT_MUTANTS: tuple[Mutant, ...] = (
    _m("low-temperatures-are-one", "sample/temperature.py",
       "np.where(t == 0, 1, t)", "np.where(t == 0, 1, np.maximum(t, 1))",
       "OUT-005 SAMPLE-028", "K13", "Temperatures below 1 are taken for 1."),
    _m("top-k-keeps-two", "sample/top_k_top_p.py",
       "kept = order[:k]", "kept = order[: max(k, 2)]",
       "OUT-006 SAMPLE-008", "K13", "Two tokens are kept where one was asked for."),
    _m("tiny-top-p-is-none", "sample/top_k_top_p.py",
       "        if p < 1.0:", "        if 1e-3 < p < 1.0:",
       "OUT-007", "K13", "A top-p near 0 is taken for no limit."),
    _m("min-p-squared", "sample/min_p.py",
       "x.max(axis=1) + np.log(p)", "x.max(axis=1) + np.log(p * p)",
       "OUT-008 SAMPLE-010", "K13", "The share of min-p is taken of itself."),
    _m("presence-rewards-alone", "sample/penalties.py",
       "        if once != 0:", "        if once < 0:",
       "OUT-009", "K13", "Presence penalties that make tokens rarer are left out."),
    _m("bias-without-its-sign", "sample/logit_bias.py",
       "+= bias[row, :n]", "+= np.abs(bias[row, :n])",
       "OUT-010 SAMPLE-014", "K13", "A bias against a token speaks for it."),
    _m("short-lists-allow-all", "sample/allowed_token_ids.py",
       "self.restricted[row] = listed is not None", "self.restricted[row] = listed is not None and len(listed) > 3",
       "OUT-011", "K13", "A list of three tokens or fewer is taken for none."),
    _m("minimum-halved", "sample/min_tokens.py",
       "new.prompt_len + params.min_tokens", "new.prompt_len + params.min_tokens // 2",
       "OUT-012 SAMPLE-016", "K13", "Requests may end at half of their minimum."),
    _m("words-of-several-tokens-allowed", "sample/bad_words.py",
       "if n <= len(outputs)", "if n == 0 <= len(outputs)",
       "OUT-013 SAMPLE-023", "K13", "Bad words of several tokens are let through."),
    _m("all-take-the-first-mask", _GRAMMAR,
       "~allowed_by(bitmask[mask_row], vocab_size)", "~allowed_by(bitmask[0], vocab_size)",
       "OUT-014 GRAMMAR-001", "K14", "Every request is held to the first mask of the step."),
    _m("scores-not-normalised", "sample/logprob.py",
       "shift[:, 0] + np.log(total)", "shift[:, 0]",
       "OUT-015 LOGPROB-001", "K15", "Log probabilities are measured from the best logit."),
    _m("window-one-short", "models/witness.py",
       "np.maximum(at - window + 1, 0)", "np.maximum(at - window + 2, 0)",
       "OUT-016 ATTN-001", "K9", "A window is one token shorter than it should be."),
)  # fmt: skip


def _dense(id: str, path: str, old: str, new: str, clauses: str, kind: str, why: str) -> Mutant:
    return _m(f"dense-{id}", path, old, new, clauses, kind, why, layout="dense")


_ROWS, _TABLES, _INPUTS = "dense/rows.py", "dense/block_table.py", "dense/inputs.py"

DENSE_KIND_MUTANTS: tuple[Mutant, ...] = (
    # -- K5 ---------------------------------------------------------------------------------------------------
    _dense("padding-rows-hold-the-slot-sentinel", _TABLES,
           "out[num_reqs:num_rows] = NULL_BLOCK_ID", "out[num_reqs:num_rows] = -1",
           "PAD-003", "K5", "Rows of padding name block -1, which is an address before the cache."),
    _dense("window-hides-behind-the-slot-sentinel", _TABLES,
           "hidden[:, None]] = NULL_BLOCK_ID", "hidden[:, None]] = -1",
           "KV-002 DENSE-033", "K5", "What a window has left behind reads as block -1."),
    _dense("no-previous-row-is-the-last", _INPUTS,
           "previous_rows[:num_reqs] >= 0", "previous_rows[:num_reqs] >= -1",
           "STAGE-004 STAGE-003 STAGE-002", "K5", "A request without a previous row takes the token of the last row."),
    # -- K6 ---------------------------------------------------------------------------------------------------
    _dense("slot-product-in-32-bits", "slot_mapping.py",
           "block * block_size + offset", "(block * block_size).astype(np.int32) + offset",
           "STAGE-005", "K6", "Block times block size is cut to 32 bits before the offset is added."),
    # -- K7 ---------------------------------------------------------------------------------------------------
    _dense("keeps-the-plans-lists", _ROWS,
           "tuple(list(ids) for ids in new.block_ids)", "new.block_ids",
           "META-017", "K7", "A request keeps the block lists of the plan, which the engine uses again."),
    _dense("counts-of-a-later-step", "async_output.py",
           "self._num_sampled = num_sampled.copy()", "self._num_sampled = np.asarray(num_sampled)",
           "META-009 ASYNC-002 DENSE-028", "K7", "How many tokens count is read when the output is taken, "
           "from a buffer of later steps."),
    # -- K11 --------------------------------------------------------------------------------------------------
    _dense("no-token-is-no-fault", "sample/faults.py",
           "counted[counted != SampleFault.NONE]", "counted[counted == SampleFault.NAN]",
           "SAMPLE-044", "K11", "A row at -inf throughout gives token 0 as if it had been drawn."),
    _dense("nan-cut-by-min-p", "sample/min_p.py",
           "threshold = x.max(axis=1) + np.log(p)", "threshold = np.nan_to_num(x).max(axis=1) + np.log(p)",
           "STAGE-003", "K11", "The share of a row with a NaN is reckoned as if that were 0, so that others are "
           "dropped."),
    # -- K13, K16 ---------------------------------------------------------------------------------------------
    _dense("penalties-of-resumed-requests-start-over", "sample/penalties.py",
           "np.bincount(outputs, minlength=vocab_size)", "np.bincount(outputs[:0], minlength=vocab_size)",
           "DENSE-024 META-013 META-005", "K16", "Who comes back has said nothing yet, as far as penalties know."),
    _dense("presence-charges-the-last-token-alone", "sample/penalties.py",
           "once * (counts > 0)", "once * (counts == counts.max())",
           "SAMPLE-021", "K13", "Presence is charged for what was said most, not for all that was said."),
    _dense("bias-ignored-below-one", "sample/logit_bias.py",
           "+= bias[row, :n]", "+= np.trunc(bias[row, :n])",
           "SAMPLE-014", "K13", "Biases are cut to whole numbers."),
    # -- K14 --------------------------------------------------------------------------------------------------
    _dense("masks-from-the-last", _GRAMMAR,
           "enumerate(grammar.structured_output_request_ids)",
           "enumerate(reversed(grammar.structured_output_request_ids))",
           "GRAMMAR-001", "K14", "Masks are handed out from the end of the list."),
    _dense("first-mask-is-none", _GRAMMAR,
           "if mask_row < 0:", "if mask_row <= 0:",
           "GRAMMAR-001", "K14", "The first mask is taken for the sign that there is none."),
    _dense("mask-of-the-next-row", _GRAMMAR,
           "    return mask_rows", "    return np.roll(mask_rows, 1)",
           "GRAMMAR-001 GRAMMAR-002", "K14", "A mask is put on the logits of the request behind."),
    # -- K15 --------------------------------------------------------------------------------------------------
    _dense("scores-of-the-own-draw", _RUNNER,
           "np.where(self.num_sampled[:r] > 0, token_ids[:, 0], own[:, 0])", "own[:, 0]",
           "LOGPROB-010 LOGPROB-001 LOGPROB-002", "K15", "Log probabilities are those of the token that the runner "
           "would have taken."),
    _dense("draws-before-its-outputs-are-computed", _ROWS,
           "self.prefill_len = self.total_len", "self.prefill_len = self.prompt_len",
           "DENSE-016 INPUT-005 SAMPLE-003", "K15", "Who was resumed draws as soon as its prompt is computed."),
    # -- K19 --------------------------------------------------------------------------------------------------
    _dense("free-rows-not-refused", "layouts.py",
           'resolve_layout("cpu", config, tuple(LAYOUTS))',
           'resolve_layout("cpu", __import__("dataclasses").replace(config, initial_free_rows=None), tuple(LAYOUTS))',
           "DENSE-032", "K19", "A list of free rows, which dense rows cannot obey, is passed over in silence."),
    _dense("bucket-of-the-real-size", "dense/runner.py",
           "tokens_padded = descriptor.num_tokens if descriptor else t", "tokens_padded = t",
           "PAD-005 SLOT-003", "K19", "The step has the size of its plan and not that of the bucket it was told."),
)  # fmt: skip

_CACHE, _BLANK = "kv_cache.py", "cache[list(block_ids)] = 0"
_EACH_CACHE = """\
        for cache in pair:
            cache[list(block_ids)] = 0"""
_BLANKING = (
    ("blocks-not-blanked", _BLANK, "cache[list(block_ids)] *= 1", "Blocks that should be blanked keep what they hold."),
    ("first-block-blanked-alone", _BLANK, "cache[list(block_ids)[:1]] = 0", "Of several blocks the first is blanked."),
    ("keys-blanked-alone", _EACH_CACHE, "        pair[0][list(block_ids)] = 0", "The values of blanked blocks stay."),
    ("first-layer-blanked-alone",
     f"for pair in caches:\n{_EACH_CACHE}", f"for pair in list(caches)[:1]:\n{_EACH_CACHE}",
     "Blocks are blanked in the first layer, and so in the first group alone."),
)  # fmt: skip

# Outcomes and memory, each seen by a probe in either layout.
PROBE_MUTANTS: tuple[Mutant, ...] = tuple(
    make(id, path, old, new, clauses, kind, why)
    for make in (_m, _dense)
    for id, path, old, new, clauses, kind, why in (
        *((id, _CACHE, old, new, "KV-008", "K1", why) for id, old, new, why in _BLANKING),
        ("second-error-lost", "async_output.py",
         "errors[req_id] = SampleFault(fault)", "errors = errors or {req_id: SampleFault(fault)}",
         "SAMPLE-044", "K15", "Of several requests without a token the first one gets an error."),
        ("outcome-not-copied", "async_output.py",
         "self._token_ids = token_ids.copy()", "self._token_ids = token_ids",
         "ASYNC-004", "K7", "An output shows the caller's own array, with what the caller writes into it later."),
        ("thinking-end-begun-least", "sample/thinking_budget.py",
         "said = n", "said = said or n",
         "SAMPLE-026", "K8", "Where an end text begins like its own middle, the shortest beginning counts."),
    )
)  # fmt: skip

KIND_MUTANTS: tuple[Mutant, ...] = (*METAMORPHIC_MUTANTS, *OUTPUT_MUTANTS, *DENSE_KIND_MUTANTS, *PROBE_MUTANTS)
