"""The contract between an engine and a model runner. NumPy and the standard library only.

Read `plan` (what a step is asked), `protocol` (what a runner is), `record` (what a step did), in this order.
"""

from runner_api.capabilities import Capability
from runner_api.config import BatchDescriptor, CUDAGraphMode, ParallelContext, ReasoningConfig, RunnerConfig
from runner_api.constants import NO_ROW, NULL_BLOCK_ID, PAD_SLOT_ID, PLACEHOLDER_TOKEN_ID, SCHEMA_VERSION, SPEC_VERSION
from runner_api.errors import (
    CallOrderError,
    CapabilityError,
    CheckpointError,
    ConfigError,
    EngineError,
    KVCacheError,
    LogitsProcessorError,
    PlanError,
    RunnerError,
    SamplingParamsError,
    TraceError,
    UnknownNameError,
)
from runner_api.kv_cache import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor, group_kv_cache_specs
from runner_api.loader import load_factory, load_runner, load_stages, runner_names
from runner_api.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    IntermediateTensors,
    LogprobsLists,
    ModelRunnerOutput,
    SampleFault,
)
from runner_api.partial import StageAdapter
from runner_api.plan import CachedRequestData, ForcedStep, GrammarOutput, NewRequestData, SchedulerOutput
from runner_api.protocol import (
    Collectives,
    DefaultModelState,
    ModelRunner,
    ModelState,
    RunnerFactory,
    RunnerInfo,
    SingleRank,
)
from runner_api.record import INTEGER_FIELDS, StepRecord
from runner_api.sampling_params import SamplingParams
from runner_api.selection import LayoutDecision, resolve_layout
from runner_api.stages import StageSet, StageSpec
from runner_api.structured_outputs import StructuredOutputsParams
from runner_api.trace import Trace, load_trace, save_trace
from runner_api.validation import PlanValidator
from runner_api.witness import WitnessConfig, WitnessGroup

__version__ = "0.1.0"
__spec_version__ = SPEC_VERSION

__all__ = [
    "EMPTY_MODEL_RUNNER_OUTPUT", "INTEGER_FIELDS", "NO_ROW", "NULL_BLOCK_ID", "PAD_SLOT_ID", "PLACEHOLDER_TOKEN_ID",
    "SCHEMA_VERSION", "SPEC_VERSION", "AsyncModelRunnerOutput", "BatchDescriptor", "CUDAGraphMode", "CachedRequestData",
    "CallOrderError", "Capability", "CapabilityError", "CheckpointError", "Collectives", "ConfigError",
    "DefaultModelState", "DraftTokenIds", "EngineError", "ForcedStep", "GrammarOutput", "IntermediateTensors",
    "KVCacheConfig", "KVCacheError", "KVCacheGroup", "KVCacheSpec", "KVCacheTensor", "LayoutDecision",
    "LogitsProcessorError", "LogprobsLists", "ModelRunner", "ModelRunnerOutput", "ModelState", "NewRequestData",
    "ParallelContext", "PlanError", "PlanValidator", "ReasoningConfig", "RunnerConfig", "RunnerError", "RunnerFactory",
    "RunnerInfo", "SampleFault", "SamplingParams", "SamplingParamsError", "SchedulerOutput", "SingleRank",
    "StageAdapter", "StageSet", "StageSpec", "StepRecord", "StructuredOutputsParams", "Trace", "TraceError",
    "UnknownNameError", "WitnessConfig", "WitnessGroup", "group_kv_cache_specs", "load_factory", "load_runner",
    "load_stages", "load_trace", "resolve_layout", "runner_names", "save_trace",
]  # fmt: skip
