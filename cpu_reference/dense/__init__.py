"""The dense layout: live requests stand in rows 0 .. n-1, in batch order, and are moved to keep it so.

The other design of the same runner (`cpu_reference.request_state` has fixed rows). Read `rows` first: what a move
must take along is the whole difficulty. Source: vLLM V1. Twin: gpu_backend/dense.
"""
