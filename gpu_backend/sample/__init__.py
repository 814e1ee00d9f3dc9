"""From logits to tokens, one step a file; `sampler` is the only place where their order is written."""
