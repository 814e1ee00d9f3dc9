"""Who chooses the layout, what forces and forbids it, and that two processes can tell whether they agree."""

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys

import pytest

import runner_api
from runner_api import (
    CapabilityError,
    ConfigError,
    ParallelContext,
    ReasoningConfig,
    RunnerConfig,
    RunnerInfo,
    load_factory,
    load_runner,
    runner_names,
)
from runner_api.config import LAYOUTS
from runner_api.loader import built_layout, call_factory, decide_layout
from runner_api.selection import LACKS, LAYOUT_VARIABLE, PACKAGES, offered_layouts, package_versions, resolve_layout

BOTH = ("slots", "dense")
# One configuration that uses each feature that some layout lacks.
USES = {
    "reorder_batch_threshold": {"reorder_batch_threshold": 1},
    "num_speculative_tokens": {"num_speculative_tokens": 2},
    "initial_free_rows": {"max_num_reqs": 2, "initial_free_rows": (1, 0)},
}
DENSE_ONLY, SLOTS_ONLY = "reorder_batch_threshold", "num_speculative_tokens"


@pytest.fixture(autouse=True)
def _variable_is_unset(monkeypatch):
    monkeypatch.delenv(LAYOUT_VARIABLE, raising=False)


def decide(options=(), offered=BOTH, variable=None, **more):
    environ = {} if variable is None else {LAYOUT_VARIABLE: variable}
    return resolve_layout("mine", RunnerConfig(**dict(options), **more), offered, environ)


def test_every_feature_is_used_by_one_configuration_and_by_no_default():
    features = {f.field: f for lacks in LACKS.values() for f in lacks}
    assert features.keys() == USES.keys()
    assert set(LACKS) == set(LAYOUTS)
    for name, feature in features.items():
        assert not feature.used(RunnerConfig())
        assert feature.used(RunnerConfig(**USES[name]))


# -- who decides --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "offered", "variable", "layout", "reason"),
    [
        # 1 the configuration, against everything else
        ({"layout": "dense"}, BOTH, None, "dense", "configuration"),
        ({"layout": "dense"}, BOTH, "dense", "dense", "configuration"),
        ({"layout": "dense"}, BOTH, "slots", "dense", "configuration (MODELRUNNER_LAYOUT=slots is overruled)"),
        ({"layout": "slots"}, BOTH, "dense", "slots", "configuration (MODELRUNNER_LAYOUT=dense is overruled)"),
        ({"layout": "slots", **USES[SLOTS_ONLY]}, BOTH, None, "slots", "configuration"),
        # 2 the environment, against the policy
        ({}, BOTH, "dense", "dense", "environment (MODELRUNNER_LAYOUT=dense)"),
        ({}, BOTH, "slots", "slots", "environment (MODELRUNNER_LAYOUT=slots)"),
        (USES[DENSE_ONLY], BOTH, "dense", "dense", "environment (MODELRUNNER_LAYOUT=dense)"),
        # 3 the policy
        ({}, BOTH, None, "slots", "policy (the default)"),
        ({}, ("dense", "slots"), None, "slots", "policy (the default)"),
        (USES["num_speculative_tokens"], BOTH, None, "slots", "policy (the default; dense lacks drafts)"),
        (USES["initial_free_rows"], BOTH, None, "slots", "policy (the default; dense lacks a list of free rows)"),
        (USES[DENSE_ONLY], BOTH, None, "dense", "policy (slots lacks a batch order by threshold)"),
        ({}, ("slots",), None, "slots", "policy (the only one offered)"),
        ({}, ("dense",), None, "dense", "policy (the only one offered)"),
        (USES[SLOTS_ONLY], ("slots",), None, "slots", "policy (the only one offered; dense lacks drafts)"),
    ],
)  # fmt: skip
def test_the_choice(options, offered, variable, layout, reason):
    decision = decide(options, offered, variable)
    assert (decision.layout, decision.reason) == (layout, reason)
    assert (decision.requested, decision.environment) == (options.get("layout"), variable)
    assert decision.offered == tuple(offered)


@pytest.mark.parametrize("value", ["", "Dense", "v1", "0", " slots", "slots,dense"])
@pytest.mark.parametrize("options", [{}, {"layout": "slots"}])
def test_a_variable_that_names_no_layout_is_refused_even_where_it_would_be_overruled(value, options):
    with pytest.raises(ConfigError, match="'slots' or 'dense'") as caught:
        decide(options, variable=value)
    assert (caught.value.field, caught.value.got) == (LAYOUT_VARIABLE, value)
    assert "Unset" in caught.value.hint


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv(LAYOUT_VARIABLE, "dense")
    assert resolve_layout("mine", RunnerConfig(), BOTH).layout == "dense"
    assert resolve_layout("mine", RunnerConfig(), BOTH, {}).layout == "slots"


# -- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("asked_by", ["configuration", "environment"])
def test_a_layout_that_was_asked_for_and_lacks_something_is_refused(layout, asked_by):
    other = next(name for name in LAYOUTS if name != layout)
    for feature in LACKS[layout]:
        uses = USES[feature.field]
        options, variable = ({**uses, "layout": layout}, None) if asked_by == "configuration" else (uses, layout)
        with pytest.raises(CapabilityError) as caught:
            decide(options, variable=variable)
        error = caught.value
        assert (error.field, error.got) == (feature.field, uses[feature.field])
        assert feature.name in error.what
        assert asked_by in error.what or LAYOUT_VARIABLE in error.what
        assert error.expected == f"{feature.field}={getattr(RunnerConfig(), feature.field)!r}"
        assert repr(other) in error.hint
        with pytest.raises(CapabilityError) as caught:
            decide(options, (layout,), variable)
        assert caught.value.hint is None  # no alternative here


@pytest.mark.parametrize(("options", "variable"), [({"layout": "dense"}, None), ({}, "dense")])
def test_a_layout_that_is_not_offered_is_refused(options, variable):
    with pytest.raises(CapabilityError) as caught:
        decide(options, ("slots",), variable)
    assert (caught.value.field, caught.value.got, caught.value.expected) == ("layout", "dense", "'slots'")
    assert "'mine'" in caught.value.what


def test_no_layout_has_both():
    both = {**USES[DENSE_ONLY], **USES[SLOTS_ONLY]}
    with pytest.raises(CapabilityError) as caught:
        decide(both)
    assert "slots lacks a batch order by threshold; dense lacks drafts" in caught.value.what
    assert caught.value.field == DENSE_ONLY
    for layout in LAYOUTS:
        with pytest.raises(CapabilityError) as caught:
            decide(both, layout=layout)
        assert caught.value.hint is None  # the other one would not do either


def test_the_only_layout_offered_lacks_something():
    with pytest.raises(CapabilityError, match="slots lacks a batch order by threshold") as caught:
        decide(USES[DENSE_ONLY], ("slots",))
    assert "'dense'" in caught.value.hint
    with pytest.raises(CapabilityError, match="dense lacks drafts"):
        decide(USES[SLOTS_ONLY], ("dense",))


@pytest.mark.parametrize("listed", [(), ("slots", "packed"), "slots", None, 5])
def test_layouts_that_a_factory_cannot_have(listed):
    with pytest.raises(ConfigError) as caught:
        offered_layouts(type("Factory", (), {"LAYOUTS": listed}))
    assert caught.value.got == listed
    with pytest.raises(ConfigError):
        resolve_layout("mine", RunnerConfig(), listed, {})


def test_a_factory_that_says_nothing_has_slots():
    assert offered_layouts(lambda config: config) == ("slots",)
    assert offered_layouts(type("Factory", (), {"LAYOUTS": ["dense"]})) == ("dense",)


# -- what the decision says ---------------------------------------------------------------------------------------


def test_what_forced_and_what_forbade():
    assert decide().forced_by == ()
    assert decide().lacking == {"slots": (), "dense": ()}
    drafts = decide(num_speculative_tokens=1)
    assert (drafts.forced_by, drafts.lacking) == (("drafts",), {"slots": (), "dense": ("drafts",)})
    rows = decide(max_num_reqs=2, initial_free_rows=(1, 0), num_speculative_tokens=1)
    assert rows.lacking["dense"] == rows.forced_by == ("drafts", "a list of free rows")
    threshold = decide(reorder_batch_threshold=1)
    assert (threshold.layout, threshold.forced_by) == ("dense", ("a batch order by threshold",))


def test_explanations_name_everything():
    decision = decide(num_speculative_tokens=2, variable="slots")
    text = decision.explain()
    for line in (
        "mine", "chosen         slots, by environment (MODELRUNNER_LAYOUT=slots)", "forced by      drafts",
        "configuration  names no layout", "environment    MODELRUNNER_LAYOUT=slots",
        "slots          has all that is used; lacks a batch order by threshold",
        "dense          forbidden: lacks drafts", f"digest         {decision.digest}",
    ):  # fmt: skip
        assert line in [part.strip() for part in text.splitlines()], line
    assert all(name in text for name in PACKAGES)
    alone = decide(offered=("slots",)).explain()
    assert "dense          not offered by this runner; has all that is used; lacks drafts, a list of free rows" in alone
    assert "forced by      nothing" in alone
    assert decision.line() == f"layout slots by environment (MODELRUNNER_LAYOUT=slots) [{decision.digest}]"
    assert "layout='dense'" in decide(layout="dense").explain()


def test_plain_values():
    decision = decide(reorder_batch_threshold=3)
    values = json.loads(json.dumps(decision.to_dict()))
    assert values.keys() == {f.name for f in dataclasses.fields(decision)}
    assert values["lacking"] == {"slots": ["a batch order by threshold"], "dense": []}
    assert hash(decision) == hash(decide(reorder_batch_threshold=3))


def test_versions_are_those_that_run():
    versions = package_versions()
    assert tuple(versions) == PACKAGES
    assert versions["modelrunner"] == runner_api.__version__
    import numpy

    assert versions["numpy"] == numpy.__version__
    versions["numpy"] = "changed"
    assert package_versions()["numpy"] == numpy.__version__


def test_a_missing_package_has_no_version(monkeypatch):
    from runner_api import selection

    monkeypatch.setattr(selection, "PACKAGES", ("modelrunner", "no-such-package-xyz"))
    decision = decide()
    assert decision.packages["no-such-package-xyz"] is None
    assert "no-such-package-xyz (not installed)" in decision.explain()


# -- the digest ---------------------------------------------------------------------------------------------------


# Another value of every field of the configuration.
OTHER_VALUES = {
    "max_num_reqs": 65, "max_num_batched_tokens": 513, "max_model_len": 1025, "layout": "slots",
    "reorder_batch_threshold": 2, "noise": "philox", "dtype": "float64", "device": "cpu", "num_speculative_tokens": 1,
    "max_concurrent_batches": 3, "initial_free_rows": tuple(range(63, -1, -1)), "window_reach": (4,),
    "logprobs_mode": "raw_logits", "reasoning": ReasoningConfig((1,), (2,)), "logits_processors": ("a.b:c",),
    "record": frozenset({"kv"}), "parallel": ParallelContext(tp_size=2, tp_rank=1),
}  # fmt: skip


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RunnerConfig)])
def test_every_field_of_the_configuration_is_in_the_digest(field):
    assert getattr(RunnerConfig(), field) != OTHER_VALUES[field]
    assert decide({field: OTHER_VALUES[field]}).digest != decide().digest


def test_reason_and_packages_are_in_the_digest(monkeypatch):
    digests = [
        decide().digest, decide(variable="slots").digest, decide(layout="slots").digest,
        decide(layout="slots", variable="dense").digest, decide(offered=("slots",)).digest,
    ]  # fmt: skip
    from runner_api import selection

    monkeypatch.setattr(selection, "package_versions", lambda: dict.fromkeys(PACKAGES, "1"))
    digests.append(decide().digest)
    monkeypatch.setattr(selection, "package_versions", lambda: dict.fromkeys(PACKAGES, "2"))
    digests.append(decide().digest)
    assert len(set(digests)) == len(digests)


def test_the_name_of_the_runner_is_not_in_the_digest():
    """The same runner is loaded by name here and by path there."""
    by_path = decide_layout(runner_names()["cpu"], RunnerConfig())
    assert decide_layout("cpu", RunnerConfig()).digest == by_path.digest


def processor(config, vocab_size):
    raise NotImplementedError


class Processor:
    pass


class Callable:
    def __call__(self):
        raise NotImplementedError


def test_processors_are_told_apart_by_name():
    digests = [
        decide(logits_processors=(p,)).digest
        for p in (
            processor, Processor, Callable(), "a:b", functools.partial(processor, 1), functools.partial(processor, 2),
            functools.partial(processor, x=1),
        )
    ]  # fmt: skip
    assert len(set(digests)) == len(digests)
    assert decide(logits_processors=(Callable(),)).digest == decide(logits_processors=(Callable(),)).digest


def test_another_process_comes_to_the_same_digest():
    """Whatever the order in which its sets and dicts are laid out."""
    code = (
        "import sys; from runner_api import RunnerConfig; from runner_api.selection import resolve_layout\n"
        "config = RunnerConfig(record=frozenset({'kv', 'logits', 'intermediates'}))\n"
        "print(resolve_layout('other', config, ('slots', 'dense'), {}).digest)\n"
        "print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    config = RunnerConfig(record=frozenset({"kv", "logits", "intermediates"}))
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        assert done.stdout.split("\n")[:2] == [resolve_layout("mine", config, BOTH, {}).digest, "[]"]


def test_what_two_decisions_differ_in(monkeypatch):
    one = decide()
    assert one.difference(decide()) == ""
    assert one.difference(decide(variable="dense")) == "MODELRUNNER_LAYOUT is unset, not dense"
    assert one.difference(decide(offered=("slots",))) == "the runner offers slots and dense, not slots"
    assert one.difference(decide(max_num_reqs=3)) == "the configuration is another"
    other = dataclasses.replace(one, packages={**one.packages, "numpy": None, "torch": "9"}, digest="x")
    assert other.difference(one).startswith(f"numpy is missing, not {one.packages['numpy']}; torch is 9, not ")


# -- where it is said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_runners_store_the_decision_that_the_loader_foretells(name, caplog):
    if name == "gpu":
        pytest.importorskip("gpu_backend.triton_support")
    config = RunnerConfig(max_num_reqs=2)
    foretold = decide_layout(name, config)
    with caplog.at_level(logging.INFO, "modelrunner"):
        info = load_runner(name, config).describe()
    assert info.selection.digest == foretold.digest
    assert info.layout == info.selection.layout == foretold.layout
    assert info.line().endswith(foretold.line())
    assert [r.getMessage() for r in caplog.records if r.name == "modelrunner"] == [info.line()]


def test_a_runner_offers_the_layouts_that_it_can_build():
    for layout in offered_layouts(load_factory("cpu")):
        assert load_runner("cpu", RunnerConfig(layout=layout)).describe().layout == layout


class Foreign(load_factory("cpu_reference.runner:CpuModelRunner")):
    """Knows nothing of choices."""

    has = "slots"

    def describe(self):
        return dataclasses.replace(super().describe(), name="foreign", layout=self.has, selection=None)


class ForeignDense(Foreign):
    has = "dense"


class Liar(Foreign):
    """Chose slots, and says that it has dense rows."""

    def describe(self):
        return dataclasses.replace(super().describe(), layout="dense", selection=self.selection)


def test_a_runner_without_a_choice_is_explained_by_the_loader(caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "modelrunner"):
        load_runner(Foreign)
    assert "layout slots by policy (the only one offered)" in caplog.text
    monkeypatch.setenv(LAYOUT_VARIABLE, "dense")
    with pytest.raises(CapabilityError, match="MODELRUNNER_LAYOUT=dense"):
        load_runner(Foreign)


def test_a_runner_that_has_another_layout_than_asked_for_is_refused():
    with pytest.raises(CapabilityError, match="asks for another"):
        call_factory(ForeignDense, RunnerConfig(layout="slots"))
    with pytest.raises(ConfigError, match="another layout than it chose"):
        call_factory(Liar, RunnerConfig())


def test_an_info_line_without_a_choice_ends_with_its_notes():
    info = RunnerInfo("x", "a.b", "0", "cpu", "float32", "slots", "murmur3", frozenset(), ("why",))
    assert info.line().endswith("noise=murmur3 (why)")
    assert built_layout(RunnerConfig(), info).reason == "policy (the only one offered)"
