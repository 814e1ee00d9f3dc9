"""Pictures of steps and traces, from StepRecords alone. Each has a data function beside it, which says what is drawn.

Drawing needs matplotlib (extra `plot`); the data functions do not. A figure shows itself in a notebook, and `save`
writes it as PNG or SVG. `Names` gives several pictures the same colours and short names.
"""

from conformance.figures.batch import batch, batch_data
from conformance.figures.blocks import blocks, blocks_data
from conformance.figures.divergence import divergence, divergence_data
from conformance.figures.kill_matrix import kill_matrix, kill_matrix_data
from conformance.figures.look import Names
from conformance.figures.rows import rows, rows_data
from conformance.figures.sampling import sampling_data
from conformance.figures.sampling_drawing import sampling
from conformance.figures.slots import slots, slots_data
from conformance.figures.style import save
from conformance.figures.timeline import requests_of, timeline, timeline_data

__all__ = [
    "Names", "batch", "batch_data", "blocks", "blocks_data", "divergence", "divergence_data", "kill_matrix",
    "kill_matrix_data", "requests_of", "rows", "rows_data", "sampling", "sampling_data", "save", "slots", "slots_data",
    "timeline", "timeline_data",
]  # fmt: skip
