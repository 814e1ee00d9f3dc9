"""The judge: holds any runner against the reference, finds the first divergence, shrinks it and shows it."""
