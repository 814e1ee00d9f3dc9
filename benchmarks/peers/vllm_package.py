"""Which files of vLLM 0.33 hold the V2 runner's kernels, and the stand-ins and patches they need in the interpreter.

The stand-ins are as small as the files allow: no platform, no configuration, no pinned memory.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from gpu_backend.triton_support import tl, triton  # first: switches the interpreter on

import torch  # isort: skip

from peers.loader import Patch, PeerPackage

VERSION = "0.33.0"
GPU = "vllm/v1/worker/gpu"
BUFFERS, INPUTS, TABLES = f"{GPU}/buffer_utils.py", f"{GPU}/input_batch.py", f"{GPU}/block_table.py"
GUMBEL, BIAS, PENALTIES = f"{GPU}/sample/gumbel.py", f"{GPU}/sample/logit_bias.py", f"{GPU}/sample/penalties.py"
MIN_P, BAD_WORDS = f"{GPU}/sample/min_p.py", f"{GPU}/sample/bad_words.py"
TOP_K_TOP_P = "vllm/v1/sample/ops/topk_topp_triton.py"
REJECTION, WATERMARK = f"{GPU}/spec_decode/rejection_sampler_utils.py", f"{GPU}/sample/watermark.py"
GRAMMAR, LOGPROB = f"{GPU}/structured_outputs.py", f"{GPU}/sample/logprob.py"
VERIFICATION = f"{GPU}/spec_decode/rejection_sampler.py"
FLY = "vllm/v1/spec_decode/fly.py"
CONTEXT_PARALLEL, TRACE = f"{GPU}/cp_utils.py", f"{GPU}/sample/trace_replay.py"


@triton.jit
def _log1p(x):
    # libdevice cannot be called in the interpreter. log(1 + x), with what 1 + x lost in rounding put back.
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.log(y) * x / tl.where(y == 1.0, 1.0, y - 1.0))


def _dispatcher(*, kernel: Any, warmup_inputs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Stand-in for vLLM's launch decorator: the function gives grid and constants, its own arguments are the rest.

    A kernel argument is bound by its name in lower case; X_STRIDE_n is a stride of X.
    """

    def decorate(choose: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any) -> None:
            given = inspect.signature(choose).bind(*args).arguments
            grid, bound = choose(*args)
            # By name: whoever counts or checks launches replaces the module's kernel.
            current = choose.__globals__[kernel.__name__]
            for name in kernel.arg_names:
                if name in bound:
                    continue
                tensor, _, dim = name.rpartition("_STRIDE_")
                bound[name] = given[tensor.lower()].stride(int(dim)) if tensor else given[name.lower()]
            current[grid](**bound)

        return launch

    return decorate


def _host_copy(values: Any, *, device: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


_LOGITS_PROCESSOR = {"LogitsContext": object, "LogitsProcessor": object, "LogitsProcRequestState": object}

STUBS: dict[str, dict[str, Any]] = {
    "vllm.envs": {},
    "vllm.logger": {"init_logger": lambda name: SimpleNamespace(warning_once=logging.getLogger(name).debug)},
    "vllm.platforms": {"current_platform": SimpleNamespace(device_type="cpu", is_cuda_alike=lambda: False)},
    "vllm.config": {"SpeculativeConfig": object},
    "vllm.config.model": {"PROCESSED_LOGPROBS_MODES": ()},
    "vllm.sampling_params": {"SamplingParams": object, "MAX_LOGPROB_TOKEN_IDS": 128},
    "vllm.triton_utils": {"tl": tl, "triton": triton, "tldevice": SimpleNamespace(log1p=_log1p), "HAS_TRITON": True},
    "vllm.utils": {"random_uuid": lambda: "0"},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": nullcontext},
    "vllm.utils.math_utils": {"cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2},
    "vllm.utils.platform_utils": {"is_uva_available": lambda: False, "num_compute_units": lambda index=None: 4},
    "vllm.utils.torch_utils": {
        "async_tensor_h2d": _host_copy,
        "get_accelerator_view_from_cpu_tensor": None,
        "PIN_MEMORY": False,
    },
    "vllm.model_executor.warmup.jit_warmup": {"WarmupChoices": None, "WarmupIntRange": None, "_when": None},
    "vllm.model_executor.warmup.jit_warmup_triton_helper": {
        "DispatchSpec": tuple,
        "TritonWarmupTensor": object,
        "triton_kernel_dispatcher_with_warmup": _dispatcher,
    },
    "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": -1},
    "vllm.v1.outputs": {"LogprobsTensors": SimpleNamespace},
    "vllm.v1.spec_decode.utils": {"unconditional_to_conditional_rates": None},
    "vllm.v1.watermarking.gpu_sampler": {"GPUWatermarkSampler": object},
    "vllm.v1.worker.gpu.metrics.logits": {"get_num_nans": None},
    "vllm.v1.worker.gpu.sample.output": {"SamplerOutput": object, "SamplingMaskTensors": object},
    "vllm.v1.worker.gpu.sample.sampler": {"Sampler": object},
    "vllm.v1.worker.gpu.states": {"RequestState": object},
    "vllm.v1.worker.gpu.sample.states": {"NO_LOGPROBS": -1},
    "vllm.v1.worker.gpu.sample.logits_processor.interface": _LOGITS_PROCESSOR,
    # Watermarked draws are not among the kernels judged here; the rejection kernels only name this function.
    "vllm.v1.worker.gpu.sample.watermark": {"philox_gumbel_block_argmax": None},
}

_WIDE_BOOL = (
    "the interpreter broadcasts a scalar bool with the type it was computed from and then takes it for no mask; "
    "& with a constant brings it to one bit"
)
PATCHES = (
    Patch(
        TOP_K_TOP_P,
        "LOGITS + row_id.to(tl.int64) * LOGITS_STRIDE_0",
        "LOGITS + tl.full((), row_id, tl.int64) * LOGITS_STRIDE_0",
        "the index of a range is a Python int in the interpreter, which has no .to",
    ),
    Patch(TABLES, "is_real_req = req_state_idx >= 0", "is_real_req = True & (req_state_idx >= 0)", _WIDE_BOOL),
    Patch(
        GRAMMAR,
        "position_is_active = position_idx < num_req_logits",
        "position_is_active = True & (position_idx < num_req_logits)",
        _WIDE_BOOL,
    ),
    Patch(TABLES, "is_local = ~sharded | is_local", "is_local = True & ~sharded | is_local", _WIDE_BOOL),
)

VLLM = PeerPackage(
    name="vllm",
    version=VERSION,
    files=(
        BUFFERS,
        INPUTS,
        TABLES,
        GUMBEL,
        BIAS,
        PENALTIES,
        MIN_P,
        BAD_WORDS,
        TOP_K_TOP_P,
        REJECTION,
        FLY,
        GRAMMAR,
        LOGPROB,
        VERIFICATION,
        CONTEXT_PARALLEL,
        TRACE,
    ),
    stubs=STUBS,
    patches=PATCHES,
)
