"""Judge Triton kernels without a GPU: run launches in the interpreter with every access checked.

    with sanitize():
        my_kernel[grid](x, y, n, BLOCK=128)

torch and triton are needed only by who uses it. `TRITON_INTERPRET=1` must be set before triton is imported.
"""
