"""Two steps are prepared while the device is still busy: what does the first one compute with?

`python examples/late_copy.py` shows it on a simulated stream, and on an NVIDIA GPU if there is one, where a long kernel
keeps the copies waiting. docs/late-copies.md explains.
"""

import numpy as np
import torch

from gpu_backend.copy_engine import SimulatedCopies, StreamCopies
from gpu_backend.dense.staging import Staging
from gpu_backend.packed_copy import PackedCopy

STEPS = ([1000, 512, 37], [7, 8, 9])  # positions of two steps' tokens
DESIGNS = {
    "one buffer, no barrier": (Staging, False),
    "one buffer, barrier": (Staging, True),
    "a buffer used once": (PackedCopy, True),
}


def positions_seen(design: str, device: str = "simulated") -> list[list[int]]:
    """The positions that each step finds on the device."""
    kind, guarded = DESIGNS[design]
    simulated = device == "simulated"
    place = torch.device("cpu" if simulated else device)
    copies = SimulatedCopies() if simulated else StreamCopies(place)
    launch = copies.launch if simulated else lambda kernel: kernel()
    positions, seen = np.zeros(3, np.int64), []
    packed = kind({"positions": positions}, 0, place, copies)
    packed.guarded = guarded

    if not simulated:
        torch.cuda._sleep(300_000_000)  # the device is busy for a tenth of a second and more
    for values in STEPS:
        with packed.barrier():
            positions[:] = values
            packed.send()
        # a kernel of the step, which reads what was sent
        launch(lambda: seen.append(packed.views["positions"].clone()))
    if simulated:
        copies.run()
    return [tensor.tolist() for tensor in seen]


if __name__ == "__main__":
    for where in ["simulated"] + ["cuda"] * torch.cuda.is_available():
        for name in DESIGNS:
            first, second = positions_seen(name, where)
            verdict = "as sent" if [first, second] == list(STEPS) else "WRONG: the first step has the second's"
            print(f"{where:10} {name:23} {first} {second}  {verdict}")
