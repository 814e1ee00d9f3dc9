"""What a logits row has seen: the known tokens of its request, then the drafts that come before it.

Twin: cpu_reference/sample/history.py.
"""

from __future__ import annotations

from gpu_backend.triton_support import tl, triton


@triton.jit
def tokens_seen(place, inside, i, position, input_ids, known, tokens):
    """Tokens at the given places of the request's sequence, int32; 0 where `inside` is false.

    What is not known yet are drafts: the inputs of the request's logits rows, of which row i's own is the last.

    position: the place of row i's own input; known: how many tokens the request's row knows; tokens: where they lie.
    """
    old = tl.load(tokens + place, mask=inside & (place < known), other=0)
    draft = tl.load(input_ids + i - (position - place), mask=inside & (place >= known), other=0)
    return tl.where(place < known, old, draft)
