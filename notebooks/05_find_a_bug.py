# %% [markdown]
# # 05 Find a bug
#
# A fault is planted in a copy of the reference. It does not crash, and what comes out looks like any other tokens.
# The judge is told nothing about it. It finds a plan that shows the fault, makes it as small as it can, and says
# which number of the step is wrong first.

# %%
import json
from contextlib import ExitStack
from dataclasses import replace

from conformance import figures
from conformance.case import Case, run_case
from conformance.finding import Budget, find, reproduces
from conformance.mutation import mutated
from engine_core.llm import LLM
from runner_api import SamplingParams, WitnessConfig, group_kv_cache_specs, load_runner

# %% [markdown]
# ## The fault
#
# A decode starts from the token that its request drew last. That token waits in a table with a place for each *row*.
# The change below looks it up by the request's place in the *batch*. Both are small integers, and nothing complains.

# %%
PATH, RIGHT, WRONG = "input_batch.py", "= last_sampled_tokens[row]", "= last_sampled_tokens[i]"
planted = ExitStack()  # the copy stays until the end of the notebook
faulty = planted.enter_context(mutated("cpu", PATH, RIGHT, WRONG)).factory

prompts, params = [[5, 6, 7], [8, 9]], SamplingParams(temperature=0.0, max_tokens=6)
for name, runner in (("right", "cpu"), ("wrong", faulty)):
    with LLM(WitnessConfig(), runner=runner) as llm:
        print(name, [output.token_ids for output in llm.generate(prompts, params)])

# %% [markdown]
# The first token of each answer is right, and the others are not; without the line above them nobody could tell.
#
# ## Look for it
#
# `find` makes up worlds: sizes, requests that come and go, chunks, padding, preemption. Every step is held against
# all laws. Without shrinking, what fails first is this:

# %%
first = find(faulty, budget=Budget(worlds=1, attempts=0))
tokens = sum(step.plan.total_num_scheduled_tokens for step in first.case.steps)
print(f"{first.clause_id}: {len(first.case.steps)} steps, {first.num_requests} requests, {tokens} tokens")

# %% [markdown]
# And with shrinking: requests, steps, tokens and parameters are taken away as long as the same clause still fails.

# %%
finding = find(faulty)
assert finding.clause_id == "MR-INPUT-005"
assert (len(finding.case.steps), finding.num_requests) == (2, 1)
assert tokens > sum(step.plan.total_num_scheduled_tokens for step in finding.case.steps)
print(f"{finding.clause_id} {finding.law}\n{finding.cell}\n\n{finding.table}")

# %% [markdown]
# One request, one token of prompt, one token of answer. In the second step the input should be the token that was
# drawn in the first one, and it is 0.
#
# ## The picture
#
# The same plans on the right runner, and the two records of the last step one above the other. The first field that
# differs is the cause; what differs behind it, here the token that is drawn, follows from it.


# %%
def last_record(case, factory):
    runner = load_runner(factory, case.config)
    runner.load_model(case.model)
    runner.initialize_kv_cache(group_kv_cache_specs(runner.get_kv_cache_specs(), case.num_blocks))
    for step in case.steps:
        runner.execute_model(step.plan, descriptor=step.descriptor)
        runner.sample_tokens(step.grammar, forced=step.forced)
    return runner.last_step()


right = last_record(finding.case, "cpu")
different = figures.divergence_data(right, finding.record).different
assert [field.name for field in different] == ["input_ids", "token_ids"]
figures.divergence(right, finding.record, labels=("right", "wrong"))

# %% [markdown]
# Why did the shrinker keep two rows for a single request? This picture says it: the request is in row 1 and at place
# 0 of the batch. With one row the two numbers would be the same, and the fault would not show.

# %%
assert finding.case.config.max_num_reqs == 2
assert right.idx_mapping.tolist() == [1]
figures.rows(right, num_rows=2)

# %%
same_number = replace(finding.case, config=replace(finding.case.config, initial_free_rows=(1, 0)))
print("in row 1:", run_case(finding.case, faulty).passed, "  in row 0:", run_case(same_number, faulty).passed)
assert not run_case(finding.case, faulty).passed
assert run_case(same_number, faulty).passed

# %% [markdown]
# ## Something to hand on
#
# A finding has a program that shows it, which needs nothing but `runner_api`. It ends in an assertion that fails on
# the runner at fault, and passes on a right one.

# %%
print(finding.snippet)

# %%
try:
    exec(finding.snippet, {})
except AssertionError as error:
    print("on the runner at fault:", error)
else:
    raise AssertionError("the snippet passed on the runner at fault")

name = next(line.strip() for line in finding.snippet.splitlines() if "_cpu_reference" in line).split('"')[1]
exec(finding.snippet.replace(name, "cpu"), {})
print("on the reference: passes")

# %% [markdown]
# The case itself is JSON. Kept in a file, it can be run on any runner that speaks the protocol, also years later or
# in another language (`modelrunner check RUNNER --corpus FOLDER` runs all that lie in a folder).

# %%
text = finding.case.text()
again = Case.from_json(json.loads(text))
print(len(text), "characters:", text[:150], "…")
assert again.text() == text
assert reproduces(finding, faulty)
assert not run_case(again, faulty).passed
assert run_case(again, "cpu").passed

# %% [markdown]
# ## And where there is no fault
#
# A judge that always finds something is of no use. On the reference itself the same search comes back with nothing.

# %%
nothing = find("cpu", budget=Budget(worlds=1))
print("found on the reference:", nothing)
assert nothing is None
planted.close()
