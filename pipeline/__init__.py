"""Cache generation: corpus → shards → Ray actors with a teacher → teachercache. Never imports trainer."""
