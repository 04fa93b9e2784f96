"""Read a cache: records, streams, the disk cache and the tokenizer."""
