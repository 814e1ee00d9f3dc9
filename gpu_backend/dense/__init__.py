"""The dense layout: live requests stand in rows 0 .. n-1, in batch order, and are moved to keep it so.

The other design of the same runner (`gpu_backend.request_state` has fixed rows). The host builds every step's inputs in
NumPy and sends them from buffers that it writes again for the next step: `staging` says what that takes.
Source: vLLM V1. Twin: cpu_reference/dense.
"""
