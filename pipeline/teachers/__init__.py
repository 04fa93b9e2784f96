"""Teachers: one interface (base), the product (vllm), the reference (hf), and a stand-in without a model (noop)."""
