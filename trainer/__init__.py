"""Students: teachercache → packed batches → fused chunked KL → checkpoint. Never imports ray or vllm."""
