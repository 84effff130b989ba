"""Text in, packed batches out: sources, tokenizers, packing, mixtures."""
