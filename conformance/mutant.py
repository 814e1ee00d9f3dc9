"""What a mutant is, and the classes of faults that they stand for."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = {
    "K1": "state of a former owner survives in a reused row or block",
    "K2": "a rebuild or reorder misses a field, or leaves two names for one array",
    "K3": "the wrong index space: batch index for row, packed for flat",
    "K4": "padding is not neutralised",
    "K5": "a sentinel is used as a real index",
    "K6": "an index computed in 32 bits overflows",
    "K7": "a buffer is reused before its reader is done",
    "K8": "arithmetic at the edge of a chunk or block, or in the wrong unit",
    "K9": "KV cache groups are mixed up",
    "K10": "a test of the batch's kind is too coarse",
    "K11": "NaN and infinity",
    "K12": "seeded sampling depends on the batch",
    "K13": "the meaning of a sampling parameter, or a batch that mixes them",
    "K14": "whose grammar mask it is",
    "K15": "bookkeeping of drafts, discarded rows and log probabilities",
    "K16": "preemption, resume and results in flight",
    "K17": "ranks disagree",
    "K18": "ownership of shared KV blocks",
    "K19": "refusal of what does not fit, and the sizes that steps are padded to",
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """In the file `path` of the runner's package, `old` (found exactly once) becomes `new`.

    `clauses`: each of them should notice; a mutant is killed if at least one does. layout: of the rows in which it is
    looked for.
    """

    id: str
    path: str
    old: str
    new: str
    clauses: tuple[str, ...]
    kind: str
    why: str
    layout: str = "slots"


def mutant(id: str, path: str, old: str, new: str, clauses: str, kind: str, why: str, layout: str = "slots") -> Mutant:
    """Clauses as words without their common prefix: "SLOT-001 PAD-004"."""
    return Mutant(id, path, old, new, tuple(f"MR-{c}" for c in clauses.split()), kind, why, layout)
