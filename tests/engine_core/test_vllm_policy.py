"""vLLM's choice as tables: every rule by a case that it alone decides, and the order in which rules are asked."""

import dataclasses
import itertools
import json

import pytest

from engine_core import vllm_policy
from engine_core.vllm_config import SPECULATIVE_METHODS, VllmConfig
from engine_core.vllm_policy import (
    NGRAM_METHODS,
    POLICIES,
    SEED_FORCED,
    SEED_MOE_ARCHITECTURES,
    SEED_NOT_ELIGIBLE,
    SEED_V2_LACKS,
    UNREAD,
    V033_OVERLAP,
    V033_OVERLAP_IF_SET,
    V033_V1_LACKS,
    V033_V1_SYNC,
    V033_V2_LACKS,
    V2_POOLING_TASKS,
    explain_vllm,
)
from runner_api import ConfigError, UnknownNameError

MOE = {"is_moe": True, "architectures": ["Qwen3MoeForCausalLM"]}
DFLASH = {"speculative_method": "dflash"}
EAGLE = {"speculative_method": "eagle"}
PIPELINE = {"pipeline_parallel_size": 2}
EXTERNAL = {**PIPELINE, "distributed_executor_backend": "external_launcher"}
OVERLAP = {"dual_batch_overlap": True}
TRITON_WARNING = "Model Runner V2 requires Triton; using the V1 model runner instead."

# Of every table: the least that makes one rule apply, in the order of the table.
CASES = {
    SEED_FORCED: [
        {"prefill_context_parallel_size": 2}, {"speculative_method": "dspark"},
        {**DFLASH, "dflash_mixed_attention": True}, {**DFLASH, "dflash_candidate_heads": True}, {"is_diffusion": True},
    ],
    SEED_NOT_ELIGIBLE: [{"is_hybrid": True}, {"is_attention_free": True}, MOE],
    SEED_V2_LACKS: [
        {"stock_torch_compile": True}, {"sequence_parallel": True, "tensor_parallel_size": 2}, EXTERNAL,
        {"speculative_method": "ngram"}, OVERLAP, {"elastic_expert_parallel": True}, {"custom_logits_processors": True},
        {"kv_sharing_fast_prefill": True},
    ],
    V033_V2_LACKS: [
        EXTERNAL, {"speculative_method": "suffix"}, {**EAGLE, "parallel_drafting": True},
        {**EAGLE, "heterogeneous_vocabulary": True},
    ],
    V033_OVERLAP: [OVERLAP],
    V033_OVERLAP_IF_SET: [
        {**OVERLAP, "lora": True}, {**OVERLAP, **EAGLE}, {**OVERLAP, **PIPELINE},
        {**OVERLAP, "decode_context_parallel_size": 2}, {**OVERLAP, "is_multimodal": True},
        {**OVERLAP, "is_hybrid": True}, {**OVERLAP, "cudagraph_mode": "piecewise"},
        {**OVERLAP, "mm_encoder_only": True},
    ],
    V033_V1_LACKS: [
        {"prefill_context_parallel_size": 2}, {"speculative_method": "dspark"}, {**DFLASH, "xpress": True},
        {**EAGLE, "adaptive_verification": True}, {**EAGLE, "draft_lm_head_quantization": True},
        {"speculative_method": "mtp", "parse_mtp": True}, {**DFLASH, "dflash_mixed_attention": True},
        {**DFLASH, "dflash_candidate_heads": True}, {"is_diffusion": True}, {"batch_sharded_sampling": True},
        {"architectures": ["Step5ForCausalLM"]}, {"sampling_mask": True}, {"trace_replay": True}, {"aux_output": True},
    ],
    V033_V1_SYNC: [
        {"speculative_method": "ngram"}, {**EAGLE, "disable_padded_drafter_batch": True}, PIPELINE,
    ],
}  # fmt: skip


def explain(version, options=(), **more):
    return explain_vllm(VllmConfig.from_dict({**dict(options), **more}), version)


def outcome(decision):
    return decision.runner, decision.reason


def cases(*tables):
    """(name as it is said, options) of each rule."""
    return [
        (rule.name.format(VllmConfig.from_dict(options)), options)
        for table in tables
        for rule, options in zip(table, CASES[table], strict=True)
    ]


def test_every_rule_applies_to_its_case_and_to_no_other_of_its_table():
    for table, listed in CASES.items():
        for i, j in itertools.product(range(len(table)), range(len(listed))):
            assert table[i].applies(VllmConfig.from_dict(listed[j])) == (i == j), (table[i].name, listed[j])
        assert not any(rule.applies(VllmConfig()) for rule in table)
    found = [v for v in vars(vllm_policy).values() if isinstance(v, tuple) and v and isinstance(v[0], vllm_policy.Rule)]
    assert set(found) == set(CASES)  # no table without cases


# -- both versions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", POLICIES)
def test_a_dense_llama_has_v2_by_default(version):
    decision = explain(version)
    assert outcome(decision) == ("V2", "policy default")
    assert decision.layout == "slots"
    assert decision.log == ((), ("Using V2 Model Runner",))[version == "0.33"]
    assert (decision.error, decision.notes) == (None, ())


@pytest.mark.parametrize("version", POLICIES)
@pytest.mark.parametrize(
    ("text", "runner"), [("0", "V1"), ("1", "V2"), ("2", "V2"), ("-1", "V2"), (" 1 ", "V2"), ("00", "V1")]
)
def test_the_variable_is_an_integer(version, text, runner):
    decision = explain(version, env=text)
    assert outcome(decision) == (runner, "env")
    assert decision.log == (("Using V2 Model Runner",) if (version, runner) == ("0.33", "V2") else ())


@pytest.mark.parametrize("version", POLICIES)
@pytest.mark.parametrize("text", ["", "true", "yes", "1.0", "V2"])
@pytest.mark.parametrize("options", [{}, {"hisparse": True}, {"watermarking": True}, {"has_triton": False}])
def test_a_variable_that_is_no_integer_stops_vllm(version, text, options):
    decision = explain(version, options, env=text)
    assert outcome(decision) == (None, "env")
    assert decision.layout is None
    assert decision.error.startswith(f"ValueError: VLLM_USE_V2_MODEL_RUNNER={text!r}")


@pytest.mark.parametrize("version", POLICIES)
def test_without_triton(version):
    assert outcome(explain(version, has_triton=False)) == ("V1", "fallback: no Triton")
    assert explain(version, has_triton=False).log == (TRITON_WARNING,)
    decision = explain(version, has_triton=False, env="1")  # the variable is asked first, and there is no way back
    assert decision.runner is None
    assert "needs Triton" in decision.error
    assert decision.log == ()
    assert explain(version, has_triton=False, env="0").runner == "V1"


@pytest.mark.parametrize("version", POLICIES)
def test_pooling_tasks_are_looked_at_when_it_is_too_late(version):
    for task in V2_POOLING_TASKS:
        assert explain(version, pooling_task=task).runner == "V2"
    decision = explain(version, pooling_task="plugin")
    assert outcome(decision) == (None, "policy default")
    assert "'plugin'" in decision.error
    assert explain(version, pooling_task="plugin", env="0").runner == "V1"
    assert explain(version, pooling_task="plugin", has_triton=False).runner == "V1"


# -- the seed's version: env, forced, model, Triton, features -----------------------------------------------------


@pytest.mark.parametrize(("name", "options"), cases(SEED_FORCED))
def test_seed_forced(name, options):
    assert outcome(explain("seed", options)) == ("V2", f"forced: {name}")
    # 1 before 2: the variable
    off = explain("seed", options, env="0")
    assert outcome(off) == ("V1", "env")
    assert off.notes == (f"only V2 has {name}",)
    # 2 before 3, 4 and 5: the model, Triton, features. What is found later stops vLLM
    assert outcome(explain("seed", options, **MOE)) == ("V2", f"forced: {name}")
    assert outcome(explain("seed", options, is_attention_free=True)) == ("V2", f"forced: {name}")
    for later in ({"has_triton": False}, {"elastic_expert_parallel": True}):
        decision = explain("seed", options, **later)
        assert outcome(decision) == (None, f"forced: {name}")
        assert ("Triton" in decision.error) == ("has_triton" in later)
        assert ("elastic expert parallelism" in decision.error) != ("has_triton" in later)


def test_seed_names_all_that_forces():
    both = explain("seed", speculative_method="dspark", is_diffusion=True)
    assert both.reason == "forced: speculative method dspark, diffusion"


@pytest.mark.parametrize(("name", "options"), cases(SEED_NOT_ELIGIBLE))
def test_seed_not_eligible(name, options):
    decision = explain("seed", options)
    assert outcome(decision) == ("V1", f"not eligible: {name}")
    assert decision.log == ()  # silence, as where V2 is taken
    assert decision.layout == "dense"
    # 1 before 3, 3 before 4 and 5
    assert outcome(explain("seed", options, env="1")) == ("V2", "env")
    assert outcome(explain("seed", options, has_triton=False)) == ("V1", f"not eligible: {name}")
    assert outcome(explain("seed", options, custom_logits_processors=True)) == ("V1", f"not eligible: {name}")


def test_seed_list_adds_mixtures_and_hybrids_and_gates_nobody():
    assert len(SEED_MOE_ARCHITECTURES) == 10
    for name in SEED_MOE_ARCHITECTURES:
        assert explain("seed", is_moe=True, architectures=[name]).runner == "V2"
        assert (
            explain("seed", is_moe=True, is_hybrid=True, architectures=["Other", name]).runner == "V2"
        )  # one is enough
        assert explain("seed", is_attention_free=True, architectures=[name]).reason.endswith("attention-free model")
    assert explain("seed", is_moe=True, architectures=[]).runner == "V1"
    assert explain("seed", architectures=["SomethingNewForCausalLM"]).runner == "V2"


def test_seed_says_what_it_does_not_know_of_rocm():
    listed = {"is_moe": True, "architectures": ["KimiK3ForConditionalGeneration"]}
    assert any("ROCm" in note for note in explain("seed", listed, platform="rocm").notes)
    assert explain("seed", listed).notes == explain("seed", platform="rocm").notes == ()


@pytest.mark.parametrize(("name", "options"), cases(SEED_V2_LACKS))
def test_seed_fallback(name, options):
    decision = explain("seed", options)
    assert outcome(decision) == ("V1", f"fallback: {name}")
    assert decision.log == (f"Model Runner V2 does not yet support {name}; using the V1 model runner instead.",)
    # 4 before 5
    assert explain("seed", options, has_triton=False).log == (TRITON_WARNING,)
    # 1 before 5, and then it is refused
    forced = explain("seed", options, env="1")
    assert outcome(forced) == (None, "env")
    assert name in forced.error
    assert outcome(explain("seed", options, env="0")) == ("V1", "env")


def test_seed_features_that_need_two():
    for options in ({"sequence_parallel": True}, {"tensor_parallel_size": 2}, PIPELINE, {**PIPELINE, **EAGLE}):
        assert explain("seed", options).runner == "V2"
    assert explain("seed", distributed_executor_backend="external_launcher").runner == "V2"
    for method in NGRAM_METHODS:
        assert explain("seed", speculative_method=method).runner == "V1"
    both = explain("seed", OVERLAP, stock_torch_compile=True)
    assert both.reason == "fallback: stock torch.compile, dual batch overlap"


# -- 0.33: HiSparse, watermarking, env, Triton, features ----------------------------------------------------------


@pytest.mark.parametrize(
    "options", [MOE, {"is_hybrid": True}, {"is_attention_free": True}, {"architectures": ["SomethingNew"]}]
)
def test_033_has_no_gate_on_the_model(options):
    assert outcome(explain("0.33", options)) == ("V2", "policy default")


def test_033_hisparse():
    assert outcome(explain("0.33", hisparse=True)) == ("V2", "forced: HiSparse")
    assert outcome(explain("0.33", hisparse=True, env="1")) == ("V2", "forced: HiSparse")
    off = explain("0.33", hisparse=True, env="0")
    assert off.runner is None
    assert "HiSparse" in off.error
    # 1 before 2: watermarking alone would overrule the variable
    assert explain("0.33", hisparse=True, watermarking=True, env="0").runner is None
    assert explain("0.33", hisparse=True, watermarking=True).reason == "forced: HiSparse"


def test_033_watermarking():
    assert outcome(explain("0.33", watermarking=True)) == ("V2", "forced: watermarking")
    off = explain("0.33", watermarking=True, env="0")  # 2 before 3
    assert outcome(off) == ("V2", "forced: watermarking")
    assert any("overrides" in line for line in off.log)
    assert len(explain("0.33", watermarking=True, env="1").log) == 1


@pytest.mark.parametrize("forced", ["hisparse", "watermarking"])
@pytest.mark.parametrize(("name", "options"), [*cases(V033_V2_LACKS, V033_OVERLAP), ("Triton", {"has_triton": False})])
def test_033_what_forces_is_asked_before_what_forbids(forced, name, options):
    decision = explain("0.33", options, **{forced: True})
    assert decision.runner is None
    assert name in decision.error
    assert decision.reason.startswith("forced")


@pytest.mark.parametrize(("name", "options"), cases(V033_V2_LACKS, V033_OVERLAP))
def test_033_fallback(name, options):
    decision = explain("0.33", options)
    assert outcome(decision) == ("V1", f"fallback: {name}")
    assert decision.log == (f"Model Runner V2 does not yet support {name}; using the V1 model runner instead.",)
    # 4 before 5
    assert outcome(explain("0.33", options, has_triton=False)) == ("V1", "fallback: no Triton")
    # 3 before 5
    assert outcome(explain("0.33", options, env="0")) == ("V1", "env")


@pytest.mark.parametrize(("name", "options"), cases(V033_V2_LACKS, V033_OVERLAP_IF_SET))
def test_033_with_the_variable_set_nothing_falls_back(name, options):
    decision = explain("0.33", options, env="1")
    assert outcome(decision) == (None, "env")
    assert decision.error == f"ValueError: V2 was chosen and does not support {name}"


def test_033_dual_batch_overlap_depends_on_the_variable():
    assert explain("0.33", OVERLAP).reason == "fallback: dual batch overlap"
    assert explain("0.33", OVERLAP, env="1").runner == "V2"  # alone it is fine, once it is asked for
    assert explain("0.33", OVERLAP, watermarking=True, env="0").runner == "V2"
    assert explain("0.33", OVERLAP, watermarking=True).runner is None
    for options in ({"prefill_context_parallel_size": 2}, {"is_encoder_decoder": True}):
        assert "dual batch overlap with" in explain("0.33", {**OVERLAP, **options}, env="1").error


def test_033_stock_compile_takes_the_graphs_away_before_features_are_checked():
    stock = explain("0.33", stock_torch_compile=True)
    assert stock.runner == "V2"
    assert stock.notes == ("stock torch.compile: cudagraph_mode full_and_piecewise becomes none",)
    assert explain("0.33", stock_torch_compile=True, cudagraph_mode="none").notes == ()
    assert explain("0.33", stock_torch_compile=True, env="0").notes == ()
    both = explain("0.33", OVERLAP, cudagraph_mode="piecewise", stock_torch_compile=True, env="1")
    assert both.runner == "V2"


def test_033_methods_with_drafters_of_their_own_draft_in_parallel():
    for method in ("dflash", "dspark"):
        assert explain("0.33", speculative_method=method, parallel_drafting=True).runner == "V2"
    assert explain("0.33", speculative_method="custom_class").reason == "fallback: speculative method 'custom_class'"
    assert explain("0.33", speculative_method="ngram").runner == "V2"


def test_033_where_no_device_was_found_triton_is_not_asked_for():
    decision = explain("0.33", has_triton=False, platform="unspecified")
    assert outcome(decision) == ("V2", "policy default")
    assert any("no device" in note for note in decision.notes)
    assert explain("0.33", platform="unspecified").notes == ()
    assert explain("0.33", has_triton=False, platform="cpu").runner == "V1"


@pytest.mark.parametrize(("name", "options"), cases(V033_V1_LACKS))
def test_033_v1_refuses(name, options):
    """What forced V2 in the seed's version only stops V1 here."""
    assert explain("0.33", options).runner == "V2"
    for chosen in ({"env": "0"}, {"has_triton": False}):
        decision = explain("0.33", options, **chosen)
        assert decision.runner is None
        assert decision.error == f"ValueError: V1 was chosen and does not support {name}"
    assert decision.log == (TRITON_WARNING,)


def test_033_platforms_that_bring_their_own_runner_check_auxiliary_outputs_themselves():
    for platform in ("tpu", "oot"):
        assert explain("0.33", aux_output=True, env="0", platform=platform).runner == "V1"
    assert explain("0.33", architectures=["Other", "Step5ForConditionalGeneration"], env="0").runner is None


# -- 0.33: what the choice makes of asynchronous scheduling -------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), cases(V033_V1_SYNC))
def test_033_v1_is_synchronous_where_it_must(name, options):
    left_open = explain("0.33", options, env="0")
    assert (left_open.runner, left_open.async_scheduling) == ("V1", False)
    assert left_open.notes == (f"asynchronous scheduling is switched off: V1 has none with {name}",)
    asked_for = explain("0.33", options, env="0", async_scheduling=True)
    assert asked_for.runner is None
    assert f"asynchronous scheduling with {name}" in asked_for.error
    refused = explain("0.33", options, env="0", async_scheduling=False)
    assert (refused.runner, refused.async_scheduling, refused.notes) == ("V1", False, ())
    assert explain("0.33", options, env="1").async_scheduling in (True, None)  # None: V2 lacks the feature


@pytest.mark.parametrize("method", SPECULATIVE_METHODS)
def test_033_methods_that_v1_runs_asynchronously(method):
    decision = explain("0.33", speculative_method=method, env="0")
    if method == "dspark":
        assert decision.runner is None
    else:
        assert decision.async_scheduling == (method not in ("ngram", "suffix", "custom_class"))


@pytest.mark.parametrize(
    ("options", "is_async", "at_once"),
    [
        ({}, True, 2), (PIPELINE, True, 3), ({"env": "0"}, True, 2), ({**PIPELINE, "env": "0"}, False, 2),
        ({"async_scheduling": False}, False, 1), ({**PIPELINE, "async_scheduling": False}, False, 2),
        ({"pooling_task": "embed"}, False, 1), ({"pooling_task": "embed", "async_scheduling": True}, True, 2),
        ({"env": "0", "async_scheduling": True}, True, 2), ({"hisparse": True, "env": "0"}, None, None),
    ],
)  # fmt: skip
def test_033_steps_under_way(options, is_async, at_once):
    decision = explain("0.33", options)
    assert (decision.async_scheduling, decision.max_concurrent_batches) == (is_async, at_once)


# -- what is not looked at is said --------------------------------------------------------------------------------


class Watched:
    """A configuration that writes down what is read of it."""

    def __init__(self, config, read):
        self.__dict__.update(config=config, read=read)

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize("version", POLICIES)
def test_options_that_a_version_never_reads(version, monkeypatch):
    read = set()
    monkeypatch.setattr(vllm_policy.dataclasses, "replace", replace_watched(read))
    tries = [{}, {"has_triton": False}, {"has_triton": False, "platform": "unspecified"}, {"hisparse": True}]
    tries += [{**options, "platform": "rocm"} for table in CASES.values() for options in table]
    for options in tries:
        for env in (None, True, False):
            POLICIES[version](Watched(VllmConfig.from_dict(options), read), env)
    assert UNREAD[version] == {f.name for f in dataclasses.fields(VllmConfig)} - read - {"env"}


def replace_watched(read):
    replace = dataclasses.replace

    def wrapped(value, **changes):
        if isinstance(value, Watched):
            return Watched(replace(value.config, **changes), read)
        return replace(value, **changes)

    return wrapped


@pytest.mark.parametrize("version", POLICIES)
def test_what_is_not_read_is_noted(version):
    options = {**EAGLE, **OVERLAP, "env": "1", "parallel_drafting": False, "lora": True, "is_moe": True}
    (note,) = explain(version, options).notes
    assert note == f"not looked at by this version's rules: {'lora' if version == 'seed' else 'is_moe'}"


# -- the input and the words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"env": 1}, "env"), ({"env": True}, "env"), ({"has_triton": "yes"}, "has_triton"), ({"is_moe": 1}, "is_moe"),
        ({"is_moe": None}, "is_moe"), ({"platform": None}, "platform"), ({"platform": "CUDA"}, "platform"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"), ({"tensor_parallel_size": 2.0}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size"), ({"async_scheduling": 1}, "async_scheduling"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"), ({"architectures": [5]}, "architectures"),
        ({"architectures": None}, "architectures"), ({"cudagraph_mode": "FULL"}, "cudagraph_mode"),
        ({"cudagraph_mode": None}, "cudagraph_mode"), ({"pooling_task": "score"}, "pooling_task"),
        ({"speculative_method": "elgae"}, "speculative_method"), ({"speculative_method": 5}, "speculative_method"),
        ({"distributed_executor_backend": 5}, "distributed_executor_backend"),
        ({"parallel_drafting": True}, "parallel_drafting"), ({"parse_mtp": True}, "parse_mtp"),
        ({**EAGLE, "dflash_mixed_attention": True}, "dflash_mixed_attention"), ({**EAGLE, "xpress": True}, "xpress"),
    ],
)  # fmt: skip
def test_wrong_values(options, field):
    with pytest.raises(ConfigError) as caught:
        VllmConfig.from_dict(options)
    assert caught.value.field == field


def test_wrong_names():
    with pytest.raises(UnknownNameError, match="Did you mean 'speculative_method'"):
        VllmConfig.from_dict({"speculative_methods": "eagle"})
    with pytest.raises(UnknownNameError, match=r"0\.33, seed"):
        explain_vllm(VllmConfig(), "0.34")
    with pytest.raises(ConfigError, match="mapping"):
        VllmConfig.from_dict([1])


def test_every_method_for_multiple_token_prediction_is_one():
    assert explain("0.33", speculative_method="glm4_moe_mtp", env="0").async_scheduling is True


def test_plain_values_and_words():
    for options in ({}, {"env": "x"}, {**OVERLAP, **PIPELINE}, {"has_triton": False}):
        for version in POLICIES:
            decision = explain(version, options)
            values = json.loads(json.dumps(decision.to_dict()))
            assert values.keys() == {f.name for f in dataclasses.fields(decision)} | {"layout"}
            assert values["layout"] == decision.layout
            text = decision.explain()
            reason = f"by {vllm_policy.ENV}" if decision.reason == "env" else decision.reason
            for part in (version, reason, *decision.log, *decision.notes, decision.error or ""):
                assert part in text
    assert explain("0.33").explain() == (
        "vLLM 0.33: V2 (the slots layout), policy default\n"
        "  logs    Using V2 Model Runner\n"
        "  steps   asynchronous, up to 2 at once"
    )
    assert "does not start" in explain("seed", env="x").explain()
    assert "nothing of the choice" in explain("seed").explain()
