"""Judge the Triton kernels of other packages: fetch their files, load these by path, run them checked, write a page.

`make peers` runs it; `docs/peers.md` tells how to add a package. Nothing here is part of the wheel or of CI.
"""
